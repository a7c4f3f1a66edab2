"""The claims of the paper and their verdicts: rules, evidence, and the study of section 5.2.

The command is `ln_zoo.cli.reproduce`.
"""
