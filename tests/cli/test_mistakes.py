"""Typical mistakes of users: each gives an exit code and one line, which names the option and what was expected."""

import re

import pytest

RUN = "run --target sketch --model MODEL --store . "
ATTACKED = RUN + "--attack-rate 50 --surrogate MODEL "
SERVE = "serve --model MODEL "
TRAIN = "train source --target sketch --out x "
ROBUST = "train robust --target sketch --out x "
PLAN = "bench main --quick --dry-run "
BENCH = "bench main --quick --store . "

UNKNOWN = [  # a name that is not known, and the nearest one
    (RUN + "--method tnt", "--method 'tnt' is unknown (did you mean 'tent'?); expected one of bn, cotta, "),
    (RUN + "--method tent+medbn", "--method 'tent+medbn' is unknown (did you mean 'tent' with norm 'medbn'?); "),
    (RUN + "--predictor safer-gate", "--predictor 'safer-gate' is unknown (did you mean 'safer-g'?); expected one of"),
    (RUN + "--norm medbm", "--norm 'medbm' is unknown (did you mean 'medbn'?)"),
    (RUN + "--attack grey", "--attack 'grey' is unknown; expected one of apgd-eot, autoattack, aware, dia, "),
    (RUN + "--attack-norm l1", "--attack-norm 'l1' is unknown; expected one of l2, linf"),
    (RUN + "--order shufled", "--order 'shufled' is unknown (did you mean 'shuffled'?)"),
    (RUN + "--precision float16", "--precision 'float16' is unknown (did you mean 'bfloat16'?)"),
    ("run --target sktch --model MODEL --store .", "--target 'sktch' is unknown (did you mean 'sketch'?)"),
    ("train source --target clipart --out x", "--target 'clipart' is unknown; expected one of cartoon, "),
    ("demo --target sktch", "--target 'sktch' is unknown (did you mean 'sketch'?)"),
    (SERVE + "--method nomethod", "--method 'nomethod' is unknown; expected one of bn, "),
    (SERVE + "--method tent+medbn", "--method 'tent+medbn' is unknown (did you mean 'tent' with norm 'medbn'?)"),
    (PLAN + "--target sktch", "--target 'sktch' is unknown (did you mean 'sketch'?)"),
    (
        TRAIN + "--architecture smal",
        "--architecture 'smal' is unknown (did you mean 'small'?); expected one of resnet18",
    ),
    (BENCH + "--executor cloud", "'cloud' is unknown; expected one of local, ray"),
    (BENCH + "--sink cloud", "'cloud' is unknown; expected one of tensorboard"),
    (BENCH + "--precision float8", "float8"),
    ("bench mian", "plan 'mian' is unknown (did you mean 'main'?)"),
    ("train sorce --target sketch --out x", "'sorce' cannot be trained; expected one of source, robust, "),
    (RUN + "--methd tent", "No such option: --methd (Possible options: --method, "),
    ("rnu", "No such command 'rnu'. Did you mean 'run'?"),
]
MISSING = [  # files and folders
    ("run --target sketch --model nowhere --store .", "Invalid value for '--model': path 'nowhere' does not exist"),
    (RUN + "--attack-rate 50 --surrogate nowhere", "Invalid value for '--surrogate': path 'nowhere' does not exist"),
    ("attack --target sketch --surrogate nowhere --store .", "Invalid value for '--surrogate': path 'nowhere'"),
    ("serve --model nowhere", "Invalid value for '--model': path 'nowhere' does not exist"),
    (SERVE + "--tokens nowhere", "Invalid value for '--tokens': file 'nowhere' does not exist"),
    (TRAIN + "--weights nowhere", "Invalid value for '--weights': file 'nowhere' does not exist"),
    (TRAIN + "--data /nowhere", "Invalid value for '--data': '/nowhere' is not a folder; expected root/domain/class"),
    ("data check /nowhere", "/nowhere is not a folder"),
    ("--extension nowhere.py methods", "--extension 'nowhere.py' is not a Python file"),
    ("bench tasks nowhere.json", "nowhere.json does not exist"),
    ("train source --target sketch --out .", ".: Is a directory"),
    ("send nowhere --stream x", "nowhere is not a folder"),
    ("run --target sketch --model OTHER --store .", "OTHER is not a safetensors file"),
]
NUMBERS = [  # numbers and devices out of range
    (RUN + "--attack-rate 150", "--attack-rate is 150.0; expected a percentage from 0 to 100"),
    (RUN + "--batch 0", "--batch is 0; expected a whole number of at least 1"),
    (RUN + "--images 0", "'--images'"),
    (ROBUST + "--eps 8", "--eps is 8; expected a positive budget for pixels in [0,1]. For 8 of 255 levels write 8/255"),
    (ROBUST + "--eps much", "Invalid value for '--eps': 'much' is not a number; expected a fraction such as 8/255"),
    (ROBUST + "--attack-steps 0", "'--attack-steps'"),
    (TRAIN + "--steps 0", "'--steps'"),
    (TRAIN + "--lr -1", "--lr is -1.0; expected a positive number"),
    (TRAIN + "--side 0", "'--side'"),
    (TRAIN + "--device nonsense", "Invalid value for '--device': 'nonsense' is not a device"),
    (BENCH + "--workers -1", "--workers"),
    (BENCH + "--seeds 0", "--seeds"),
    (BENCH + "--images -5", "--images"),
    (BENCH + "--device abacus", "'abacus' is not a device"),
    (SERVE + "--abstain 2", "--abstain is 2.0; expected a number from 0 to 1"),
    (SERVE + "--port 99999", "'--port'"),
]
TOGETHER = [  # options that do not go together, or that are missing
    ("run --target sketch", "Missing option '--model'"),
    (RUN + "--attack-rate 50", "needs --surrogate"),
    (RUN + "--attack-norm l2", "--eps is missing and an l2 budget has no default"),
    (RUN + "--attack autoattack --attack-steps 3", "autoattack chooses its steps itself; leave --step and"),
    (
        RUN + "--attack eot-margin --attack-option drws=3",
        "has no option drws (did you mean 'draws'?); expected some of draws, ",
    ),
    (
        RUN + "--attack transfer --attack-option eps=0.1",
        "attack 'transfer' has no option eps; expected some of momentum, ",
    ),
    (RUN + "--attack apgd-eot --step 1/255", "apgd-eot chooses its steps itself; leave --step and"),
    (ATTACKED + "--attack-norm l2 --attack-rate 50", "--eps is missing"),
    ("attack --target sketch --surrogate MODEL --store . --attack eot", "--attack 'eot' goes through the deployed"),
    (TRAIN + "--eps 8/255", "--eps and --attack-steps apply only to `safer train robust`"),
    (TRAIN + "--architecture resnet18", "no pretrained weights given"),
    ("train source --out x", "Missing option '--target'"),
    (SERVE + "--predictor safer --abstain 0.3", "--abstain is 0.3 and the predictor 'safer' estimates no suspicion"),
    (SERVE + "--predictor plain --views 3", "--predictor 'plain' has no option views"),
    (SERVE + "--host 0.0.0.0", "expected --tokens"),
    ("bench main epsilon", "one plan at a time"),
    ("bench tasks file --dry-run", "has no --dry-run"),
    ("bench main --address ray://x", "--executor ray"),
    ("bench main --quick --steps 7", "sets its own sizes"),
]


@pytest.mark.parametrize(("arguments", "message"), [*UNKNOWN, *MISSING, *NUMBERS, *TOGETHER])
def test_a_mistake_gives_one_line_and_an_exit_code(arguments, message, safer, source_file, tmp_path, monkeypatch):
    (tmp_path / "OTHER").write_text("not a model")
    monkeypatch.chdir(tmp_path)
    ended = safer(*arguments.replace("MODEL", str(source_file)).split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in complaint(ended.stderr)
    assert not list(tmp_path.rglob("*.safetensors"))


def complaint(errors):
    """Return the one line that says what is wrong; two lines on the use of the command may stand before it."""
    *usage, line = [line for line in errors.splitlines() if line]
    assert re.match("error: |Error: ", line)
    assert [other.split()[0] for other in usage] in ([], ["Usage:", "Try"])
    return line
