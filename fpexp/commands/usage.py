"""The text of `fpexp <command> --help`; groups and choices are read from conf/."""

from __future__ import annotations

from collections.abc import Sequence

from fpexp.bench import BENCHMARKS
from fpexp.config.catalogue import GROUPS, choices, conf_dir
from fpexp.config.schema import TARGET, leaves
from fpexp.config.search_path import own_folders

TRAIN = """\
usage: fpexp train [-m] [group=choice ...] [key=value ...]
       fpexp train resume=<run id>
       fpexp train config=<config.yaml or .json> [key=value ...]
       torchrun --nproc-per-node=<n> -m fpexp train ...

Trains one run and measures its length-generalisation curve. Everything goes to <results_dir>/runs/<run id>.
With -m, comma-separated values make one run each: fpexp train -m task=a4 model=fp_mamba_k,lstm seed=0,1
An experiment may bring a grid of its own (sweep.grid): fpexp train -m experiment=fig4_state_tracking seed=0,1,2.
There a group that you name, such as model=lstm, chooses among the rows; any other key takes the place of theirs.
A job that fails does not stop the others (sweep.fail_fast=true does); its folder under <results_dir>/sweeps says why.
Of two sweeps at once one has a job: the other leaves it out and says so.
What an earlier sweep has finished, or what is recorded under sweep.recorded (auto: the repository's results/reference)
is not run again, unless sweep.rerun=true.
Several at once: hydra/launcher=joblib hydra.launcher.n_jobs=2, with a share of the CPUs each (threads=0) or threads=1.
On a cluster: hydra/launcher=submitit_slurm, with pip install 'fpexp[slurm]'; see scripts/slurm.
Under torchrun each process takes its share of training.batch_size, and any number of them may resume the run. They
give the losses of one process, but for dropout and for solvers that stop by a share of the batch, which is each's own.

groups:
{groups}
keys, with their defaults (??? is set by the scale):
{keys}

The keys of a task, model, solver, schedule or gradient stand in its file, with reasons: {conf}/<group>/<choice>.yaml
`fpexp train task=<task> model=<model> --help` prints every key of that run with its value."""

SWEEP = """\
usage: fpexp sweep status experiment=<name> [group=choice,... ...] [key=value,... ...]

Lists the jobs that fpexp train -m would have with these words, and of each whether it is finished, recorded (finished,
under sweep.recorded), running, interrupted, lost (its process is gone), failed (with the reason) or missing; "not
measured" where the experiment has something measured after training that is still to be done. Then how long the rest
will train, as far as finished runs of its kind tell, and the commands that make it. Reads files only; the exit code is
0 whatever they say."""

EVALUATE = """\
usage: fpexp evaluate run=<run id or folder> [lengths=[2,16,64]] [samples=<n>] [batch_size=<n>]
                      [solver=picard|anderson|lagged|sequential] [tolerance=0.001] [max_iterations=[1,2,4,8]]
                      [against=sequential] [checkpoint=newest|best] [device=cpu] [results_dir=results]

Measures a recorded run's checkpoint once more, prints the rows and keeps them under the run's evaluations/ folder, with
what was asked for in settings.json: curve.jsonl with a picture; iterations.jsonl, where max_iterations= names caps on
whole-sequence iterations; agreement.jsonl, where against= names a second solver: how far its fixed points are from
those of solver=, relative to their size, and whether the model answers alike. tolerance= is of both; without it they
have the run's own. What is not named is as in the run's config. Where all lengths are read off one pass, as on
word problems, the sequences are drawn at the longest of them, so another longest length means other sequences."""

GENERATE = """\
usage: fpexp generate run=<run id or folder> prompt='<text>' [limit=<tokens>] [checkpoint=newest|best] [device=cpu]
                      [results_dir=results]

Reads a prompt with a recorded run's model and prints what it makes of it, and how large a state it carries. Of a task
with an answer at every token (word problems: element numbers, such as prompt='3 17 5'), the answers, one token read at
a time, above the right ones; of a task that writes its answer, the prompt and what follows, at most `limit` tokens
(256), or as many as the right answer has where there is one (prompt='$abcde|' for copy, prompt='(1+2)*3=' for
modular_arithmetic)."""

RUNS = """\
usage: fpexp runs [results_dir=results]

Lists recorded runs: id, task, model, status, token accuracy at the training length and at four times it
("-" where its curve has no such length)."""

REPORT = """\
usage: fpexp report [experiment=<name>,...] [out=<folder>] [results_dir=results] [<key>=<value> ...]

Makes tables (Markdown, CSV), figures (PNG, SVG) and one HTML page that needs nothing else, from what is recorded under
<results_dir>: runs/ and reference/runs/, bench/ and reference/bench/, and, in a column of its own, what the paper
reports (paper/); reference/ and paper/ are the repository's where <results_dir> has none. Of all experiments, unless
some are named; `fpexp list experiments` lists them.

A run belongs to an experiment by its config, whatever its seed, threads and id: means and sample standard deviations
are over the seeds that are there. Of equal runs the newest finished one counts. What is missing is listed with the
command that makes it, what failed or was interrupted as such; nothing is filled in.

Further words are as for train and choose other runs of the same experiment: scale=gpu, seed=0,1,2. The folder,
<results_dir>/report unless named, is replaced as a whole; the same records give the same bytes. How an experiment is
reported stands in its own file, under `report`: {conf}/experiment/<name>.yaml"""

BENCH = """\
usage: fpexp bench [<name> ...] [threads=0] [repeats=15] [warmup=2] [budget=60] [results_dir=results]
                   [<key of a benchmark>=<value> ...]
       fpexp bench --list

Runs benchmarks, all of them unless some are named, one after another in one process. Every contender is first checked
against the reference; then they are timed in turn, A B A B, `repeats` rounds after `warmup`, or as many as
`budget` seconds allow those that are compared with each other, at least three. Prints a table for each and writes
<results_dir>/bench/<name>-<time>.json.

benchmarks, with keys of their own:
{benchmarks}

Packages to compare with come with pip install 'fpexp[bench]'; what is not installed is left out and said."""

DATA = """\
usage: fpexp data prepare task=<task> data.tokens=<number> [data.output=<folder>] [data.shard_tokens=1e8]
                          [task.source=local task.files='data/*.jsonl'] [<key>=<value> ...]

Writes the tokens of a task's documents into files that training reads without them, and without a network:
fpexp train task=fineweb task.source=shards task.files=<folder>. One pass at most over the documents; those of
validation and test are kept apart. What a stop or a full disk leaves is whole; the same command goes on from there.
Words other than data.* are as for train; model and training have no meaning here. The folder is
<results_dir>/data/<task>-<tokenizer> unless named. Files: .parquet, .jsonl, .json, and text (task.text_unit), the
latter three also as .gz, .bz2 or .zst."""

LIST = """\
usage: fpexp list [tasks|models|solvers|schedules|gradients|scales|experiments] [hydra.searchpath=[...]]
       fpexp list models [task=<task>] [<key>=<value> ...]

Lists what conf/ offers, one line each, and with hydra.searchpath=[file:///path/to/my/conf] what stands in a folder of
your own; train, sweep status, report and data prepare take the same word. `fpexp list models` counts each model's
parameters at every scale, for task=a5 or what is named as for train: fpexp list models task=s5 model.d_model=128"""

DOCTOR = """\
usage: fpexp doctor [results_dir=results]

Shows versions, devices, the backend that each op would use and free disk. Exit code 1, with the mend, when something
is missing."""

TEXTS = {
    "sweep": SWEEP,
    "evaluate": EVALUATE,
    "generate": GENERATE,
    "runs": RUNS,
    "data": DATA,
    "list": LIST,
    "doctor": DOCTOR,
}


def describe(command: str, words: Sequence[str] = ()) -> str:
    """Return the help text of a command; for `train`, and words that describe a run, every key of that run."""
    if command == "bench":
        return BENCH.format(benchmarks="\n".join(map(_benchmark, BENCHMARKS)))
    if command == "report":
        return REPORT.format(conf=conf_dir())
    if command != "train":
        return TEXTS[command]
    named = {word.partition("=")[0] for word in words}
    if named & {"experiment", "config"} or {"task", "model"} <= named:
        return _keys_of_a_run([word for word in words if word not in ("-m", "--multirun")])
    own, groups = own_folders(words), []
    for group in GROUPS:
        groups.append(f"  {group}")
        groups += [f"    {name:<16} {text}" for name, text in choices(group, own).items()]
    return TRAIN.format(groups="\n".join(groups), keys=_top_level_keys(), conf=conf_dir())


def _keys_of_a_run(words: list[str]) -> str:
    from fpexp.commands.train import read_run_config
    from fpexp.config.quoting import override_word
    from fpexp.config.values import as_text

    config = leaves(read_run_config(words).to_dict())
    keys = [(key, value) for key, value in config if not key.startswith("choices.") and not key.endswith(TARGET)]
    return "\n".join(
        override_word(key, value) if isinstance(value, str) else f"{key}={as_text(value)}" for key, value in keys
    )


def _benchmark(name: str) -> str:
    return f"  {name:<18} {BENCHMARKS[name].text}\n{'':<20} {BENCHMARKS[name].keys}"


def _top_level_keys() -> str:
    """Return the plain keys and the training and evaluation sections of config.yaml, as they stand there."""
    lines = (conf_dir() / "config.yaml").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("device:"))
    end = next(i for i, line in enumerate(lines) if line.startswith("hydra:"))
    return "\n".join(f"  {line}".rstrip() for line in lines[start:end])
