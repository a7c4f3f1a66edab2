"""Two nodes of two processes, simulated on one machine: the numbers of one process.

Each node is a launcher of its own, ``torchrun``, as on a cluster.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import environment, results, write_idx

pytestmark = pytest.mark.slow

RUN = "import sys\nfrom ln_zoo.cli import main\nsys.exit(main(sys.argv[1:]))\n"
#: 24 training images make equal shares of batches; 13 test images are nobody's multiple.
COMMON = (
    "--model=MLPClassifier", "--model.hidden_sizes=[8]", "--model.norm=LayerNorm", "--data=MNIST",
    "--data.root=mnist", "--data.train_size=24", "--data.val_size=13", "--data.eval_batch_size=3",
    "--optimizer=SGD", "--optimizer.lr=0.1", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
)  # fmt: skip


def nodes(folder: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """Both launchers, each writing to a file of its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    started = []
    for node in range(2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
            f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", "run.py",
            *arguments, "--trainer.num_nodes=2", "--trainer.devices=2", "--trainer.strategy=ddp",
        ]  # fmt: skip
        with (folder / f"node{node}.log").open("wb") as log:
            started.append(subprocess.Popen(
                command, cwd=folder, env=environment(), stdout=log, stderr=log,
                start_new_session=True,
            ))  # fmt: skip
    return started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_idx(tmp_path / "mnist")
    (tmp_path / "run.py").write_text(RUN)
    return tmp_path


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_two_nodes_give_the_scores_of_one_process(folder: Path) -> None:
    fit = ("fit", *COMMON, "--trainer.max_epochs=2", "--test_after_fit=true")
    both = nodes(folder, *fit, "--data.batch_size=2", "--trainer.logger.save_dir=four")
    try:
        codes = [process.wait(timeout=600) for process in both]
    finally:
        end(both)
    logs = [(folder / f"node{node}.log").read_text()[-3000:] for node in range(2)]
    assert codes == [0, 0], logs
    one = [
        sys.executable, "run.py", *fit, "--data.batch_size=8", "--trainer.devices=1",
        "--trainer.logger.save_dir=one",
    ]  # fmt: skip
    subprocess.run(one, cwd=folder, env=environment(), check=True, timeout=600)
    single, four = (results(folder / name)["metrics"] for name in ("one", "four"))
    assert four == pytest.approx(single, rel=1e-5)
