"""The commands of `ln-zoo`."""

#: Commands of the LightningCLI; see `ln_zoo.cli.lightning`.
TRAINING = ("fit", "validate", "test", "predict")
#: All others: typed functions, imported when called; see `ln_zoo.cli.commands`.
COMMANDS = {
    "list": "ln_zoo.cli.published:list_",
    "cards": "ln_zoo.cli.published:cards",
    "card": "ln_zoo.cli.published:card",
    "publish": "ln_zoo.cli.published:publish",
    "sweep": "ln_zoo.cli.sweep:sweep",
    "reproduce": "ln_zoo.cli.reproduce:reproduce",
    "compare": "ln_zoo.cli.compare:compare",
    "analyze gradient_flow": "ln_zoo.cli.analyze:gradient_flow",
    "analyze invariance": "ln_zoo.cli.analyze:invariance",
    "analyze fisher": "ln_zoo.cli.analyze:fisher",
    "analyze dynamics": "ln_zoo.cli.analyze:dynamics",
    "analyze trained_dynamics": "ln_zoo.cli.trained_dynamics:trained_dynamics",
    "data iam_ondb": "ln_zoo.cli.data:iam_ondb",
    "draw": "ln_zoo.cli.draw:draw",
    "write": "ln_zoo.cli.write:write",
    "evaluate-sentences": "ln_zoo.cli.evaluate_sentences:evaluate_sentences",
    "kernels": "ln_zoo.cli.kernels:kernels",
    "export": "ln_zoo.cli.export:export",
}
