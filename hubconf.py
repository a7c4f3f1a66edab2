"""Published models for ``torch.hub.load(path, name, source="local")``, dots as underscores."""

from functools import partial

from ln_zoo import list_models, load

dependencies = ["torch", "lightning", "safetensors"]

for _name in list_models():
    globals()[_name.replace(".", "_").replace("-", "_")] = partial(load, _name)
