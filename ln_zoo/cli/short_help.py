"""The options of training that people use, on one screen. Imports no torch."""

_HELP = """\
usage: ln-zoo {command} --model NAME --data NAME [options]
{first}
  --config FILE                  a file, or a name of ours: quickstart, mlp/paper; may be repeated
  --model NAME                   a model of ln_zoo, or any LightningModule: my_file.MyModule
  --model.norm NAME              LayerNorm, BatchNorm, WeightNorm, RMSNorm, or Identity for none
  --model.lr RATE                and every other argument: --model.help NAME lists them
  --data NAME                    a dataset of ln_zoo, or any LightningDataModule: my_file.MyData
  --data.root FOLDER             files of the dataset; --data.help NAME lists all arguments
  --weights NAME                 start from a published model, a card or a .ckpt file
  --ckpt_path FILE               {resume}; last: the newest
  --seed_everything N            seed of weights, noise and the order of the data; default 0
  --optimizer NAME               replaces the model's own; --lr_scheduler NAME too
  --trainer.max_epochs N         also --trainer.max_steps N, --trainer.max_time DD:HH:MM:SS
  --trainer.accelerator NAME     auto, cpu or gpu; --trainer.devices N
  --trainer.callbacks+=NAME      add a callback: Normalize, EarlyStopping, ModelCheckpoint, ...
  --trainer.logger.save_dir DIR  folder of the runs; default runs
  --test_after_fit true          score the last weights on the test set after fit

  --print_config                 print all settings as YAML, and exit
  --help_all                     every option; takes seconds

example: ln-zoo {command} {example}
"""
_RESUME = "go on from this checkpoint"
_READ = "the checkpoint of these weights"
_FIRST = {
    "fit": "Trains a model.",
    "validate": "Scores a model on the validation set.",
    "test": "Scores a model on the test set, beside the numbers of its card.",
    "predict": "Writes a model's predictions to a file.",
}


def short_help(command: str) -> str:
    """Help of ``fit``, ``validate``, ``test`` or ``predict``."""
    fit = command == "fit"
    example = "--config quickstart" if fit else "--weights mlp.layernorm --data MNIST"
    resume = _RESUME if fit else _READ
    return _HELP.format(command=command, first=_FIRST[command], resume=resume, example=example)
