"""Local task files: a YAML in the format of lm-evaluation-harness, and data files beside it.

The harness runs code that a task file names: functions after ``!function``, classes, metrics that the
``evaluate`` package downloads, pickled data sets, and any Python that its Jinja templates reach. An untrusted
file may therefore hold plain data only: known keys, metrics built into the harness, documents in local JSON,
CSV, Parquet, Arrow or text files. Its templates are rendered in Jinja's sandbox
(:func:`marlinq.operations.evaluate.tasks.harness.sandboxed_templates`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from marlinq.core.errors import UsageError
from marlinq.core.files import read_regular
from marlinq.core.plain_values import MAX_YAML_BYTES, load_yaml

SUFFIXES = (".yaml", ".yml")
TRUST = "--trust-task-code"

_DEEPEST_INCLUDE = 8
_MOST_FILES = 64
_READERS = ("arrow", "csv", "json", "parquet", "text")
_DATA_KEYS = ("data_files", "field")
_KEYS = frozenset(
    {
        "task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "training_split",
        "validation_split", "test_split", "fewshot_split", "doc_to_text", "doc_to_target", "doc_to_choice",
        "description", "target_delimiter", "fewshot_delimiter", "gen_prefix", "num_fewshot", "metric_list",
        "output_type", "generation_kwargs", "repeats", "filter_list", "should_decontaminate",
        "doc_to_decontamination_query", "metadata",
    }
)  # fmt: skip
_METRIC_KEYS = frozenset(
    {
        "metric", "aggregation", "higher_is_better", "ignore_case", "ignore_punctuation", "ignore_numbers",
        "regexes_to_ignore",
    }
)  # fmt: skip


def is_task_file(task: str) -> bool:
    """Whether ``task`` is a file name and not a task of the harness."""
    return task.endswith(SUFFIXES)


def read_task(path: str, metrics: Collection[str]) -> dict[str, Any]:
    """An untrusted task file as a mapping of plain values, with absolute paths of its data files.

    Args:
        path: path of the YAML.
        metrics: names of the metrics built into the harness.

    Raises:
        UsageError: the file can't be read, or names something that is code or may download code.
    """
    task = _merged(Path(path), (), [])
    if not isinstance(task.get("task"), str):
        raise _refused(path, "expected a name under task, found none; a group of tasks is named task by task")
    for key in task:
        if key not in _KEYS:
            raise _refused(path, f"the key {key!r} is none of a plain task's; remove it, or pass {TRUST}")
    for metric in _mappings(path, task, "metric_list"):
        name, unknown = metric.get("metric"), sorted(set(metric) - _METRIC_KEYS)
        if not isinstance(name, str) or name not in metrics or unknown:
            what = f"the option {unknown[0]!r}" if unknown else repr(name)
            raise _refused(
                path, f"metric {what} is not the harness's own and may be code; pass {TRUST} to run it"
            )
    return {**task, "dataset_kwargs": _local_data(Path(path), task)}


def with_local_data(path: str, task: dict[str, Any]) -> dict[str, Any]:
    """A trusted ``task`` with absolute paths for the data files that are beside its YAML ``path``."""
    options = task.get("dataset_kwargs")
    if not isinstance(options, Mapping) or "data_files" not in options:
        return task
    files = _resolved(Path(path), options["data_files"], required=False)
    return {**task, "dataset_kwargs": {**options, "data_files": files}}


def _merged(path: Path, outer: tuple[Path, ...], read: list[Path]) -> dict[str, Any]:
    """The file's keys merged over those of the files that it includes.

    Args:
        path: path of the file.
        outer: files that include this one.
        read: files that were read so far, to which those read here are added.
    """
    if path in outer or len(outer) >= _DEEPEST_INCLUDE:
        raise _refused(
            path, f"include: files include each other, or more than {_DEEPEST_INCLUDE} deep; correct it"
        )
    read.append(path)
    if len(read) > _MOST_FILES:
        raise _refused(path, f"include: more than {_MOST_FILES} files; correct it")
    try:
        value = load_yaml(read_regular(path, MAX_YAML_BYTES))
    except OSError as error:
        raise _refused(
            path, f"{error.strerror or error}; name a YAML file, or a task of the harness"
        ) from None
    except ValueError as error:
        code = "'!function'" in str(error) or "python/" in str(error)
        advice = f"; {TRUST} runs the code that it names" if code else "; correct the file"
        raise _refused(path, f"{error}{advice}") from None
    if not isinstance(value, dict):
        raise _refused(path, "expected the keys of a task, found something else; correct the file")
    included = value.pop("include", [])
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        if not isinstance(name, str):
            raise _refused(path, "include: expected names of files; correct it")
        merged |= _merged(path.parent / name, (*outer, path), read)
    return merged | value


def _mappings(path: str, task: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    entries = task.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise _refused(path, f"{key}: expected a list of mappings, found something else; correct the file")
    return entries


def _local_data(path: Path, task: Mapping[str, Any]) -> dict[str, Any]:
    reader, options = task.get("dataset_path"), task.get("dataset_kwargs")
    if reader not in _READERS:
        raise _refused(
            path,
            f"dataset_path: expected one of {', '.join(_READERS)}, found {reader!r}; convert the documents, "
            f"or pass {TRUST}",
        )
    if not isinstance(options, dict) or "data_files" not in options:
        raise _refused(path, "dataset_kwargs: expected data_files with the documents' files; add them")
    for key in options:
        if key not in _DATA_KEYS:
            raise _refused(path, f"dataset_kwargs: the key {key!r} is not data_files or field; remove it")
    return {**options, "data_files": _resolved(path, options["data_files"], required=True)}


def _resolved(path: Path, value: Any, *, required: bool) -> Any:
    """``data_files`` with absolute paths for the files that lie beside the task file ``path``.

    Raises:
        UsageError: ``required``, and a file does not lie there.
    """
    if isinstance(value, dict):
        return {key: _resolved(path, each, required=required) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(path, each, required=required) for each in value]
    folder = path.parent
    # Unlike Path.is_file, this takes names that no file can have.
    if isinstance(value, str) and os.path.isfile(folder / value):  # noqa: PTH113
        return str((folder / value).absolute())
    if required:
        raise _refused(path, f"data_files: no local file {value!r}; put it beside the task's YAML")
    return value


def _refused(path: str | Path, why: str) -> UsageError:
    return UsageError(f"--tasks {path}: {why}")
