"""A tiny model, the results of its card, and a hub on loopback."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from refusals import refuses
from torch import Tensor

from ln_zoo.models import MLPClassifier
from ln_zoo.norms import Norm, Site
from ln_zoo.zoo import CardError, write_card

MakeCard = Callable[..., Path]
Tested = tuple[Path, Path]
refuses = functools.partial(refuses, error=CardError)

RESULTS: dict[str, Any] = {
    "metrics": [
        {"name": name, "value": value, "unit": unit, "dataset": "digits", "split": "test"}
        for name, value, unit in (("error", 0.0525, "fraction"), ("nll", 0.1875, "nats"))
    ],
    "evaluation": {
        "command": "ln-zoo test --ckpt_path best.ckpt",
        "seed": 3,
        "hardware": "2 CPU cores",
        "date": "2025-01-31",
        "versions": {"torch": "2.13.0", "lightning": "2.6.6"},
    },
    "training": {"epochs": 2, "steps": 20, "commands": ["ln-zoo fit --config mine.yaml"]},
    "size": {},
    "data": {"dataset": "digits", "batch_size": 32, "test_size": 359},
    "card": {"license": "mit", "notes": ["a model for tests"], "differences": ["other data"]},
}
PREPROCESSING = {"scale": 16, "image_shape": [1, 8, 8]}


@dataclass(frozen=True)
class Doubling(Norm):
    """A user's own norm: a gain, and a multiple of the sums."""

    factor: float = 2.0

    def init_params(self, site: Site) -> None:
        site.add_affine(gain=1.0)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        return site.affine(self.factor * a)


def tiny(norm: Norm | None = None, seed: int = 0) -> MLPClassifier:
    torch.manual_seed(seed)
    return MLPClassifier(64, hidden_sizes=[16], num_classes=10, norm=norm)


def save(folder: Path, model: Any, results: Any = RESULTS, **options: Any) -> Path:
    """Write a card of a model, by default with the results above and no preprocessing."""
    return write_card(folder, model, results, **{"preprocessing": {}} | options)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(read(path) | changes))


class StubHub:
    """As much of the hub's protocol as uploading and downloading a model repository take."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.lfs_files: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: dict[str, str | None] = {}
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                stub.requests.append(f"{self.command} {path}")
                stub.tokens[stub.requests[-1]] = self.headers.get("Authorization")
                status, headers, content = stub.respond(self.command, path, body)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def respond(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        def as_json(value: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
            return status, {"Content-Type": "application/json"}, json.dumps(value).encode()

        missing = 404, {"X-Error-Code": "RepoNotFound"}, b""
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            if repo in self.branches:
                return as_json({"error": "exists", "url": f"{self.url}/{repo}"}, 409)
            self.commits["0" * 40] = {}
            self.branches[repo] = {"main": "0" * 40}
            self.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return as_json({"url": f"{self.url}/{repo}", "name": repo})
        if path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            errors = [] if front["model-index"] else [{"message": "no model-index"}]
            return as_json({"errors": errors, "warnings": []}, 400 if errors else 200)
        if found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/([a-z]+)/([\w.-]+)", path):
            repo, action, revision = found.groups()
            if repo not in self.branches:
                return missing
            if action == "branch":
                if revision in self.branches[repo]:
                    return as_json({"error": "branch exists"}, 409)
                self.branches[repo][revision] = self.branches[repo]["main"]
                return as_json({})
            commit = self.branches[repo].get(revision, revision)
            if commit not in self.commits:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            files = self.commits[commit]
            if action == "preupload":
                asked = [file["path"] for file in json.loads(body)["files"]]
                modes = ["lfs" if path in self.lfs_files else "regular" for path in asked]
                answer = [
                    {"path": path, "uploadMode": mode, "shouldIgnore": False}
                    for path, mode in zip(asked, modes, strict=True)
                ]
                return as_json({"files": answer})
            if action == "commit":
                files = dict(files)
                for line in body.decode().splitlines():
                    item = json.loads(line)
                    value = item["value"]
                    if item["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif item["key"] == "lfsFile":
                        files[value["path"]] = self.blobs[value["oid"]]
                oid = hashlib.sha1(body + commit.encode()).hexdigest()
                self.commits[oid] = files
                self.branches[repo][revision] = oid
                return as_json({"commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"})
            if action == "tree":
                tree = {p: {"size": len(c), "oid": _etag(c)} for p, c in files.items()}
                return as_json([{"type": "file", "path": p, **each} for p, each in tree.items()])
            assert action == "revision", path
            siblings = [{"rfilename": p} for p in files]
            return as_json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings})
        if found := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}
            return as_json({"transfer": "basic", "objects": objects})
        if method == "PUT" and path.startswith("/lfs/"):
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.blobs[oid] = body
            return as_json({})
        if found := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.+)", path):
            repo, revision, name = found.groups()
            if repo not in self.branches:
                return missing
            commit = self.branches[repo].get(revision, revision)
            content = self.commits[commit].get(name)
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(content)}"'}
            return 200, headers, content
        return missing


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
