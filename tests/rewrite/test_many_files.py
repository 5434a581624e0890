"""Files of one run know of one another."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from fsdp_migrate.rewrite import Options, Result, rewrite_files


def project(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))


def run(folder: Path, **options: int) -> dict[str, Result]:
    results = rewrite_files([folder], Options(**options))  # type: ignore[arg-type]
    return {str(Path(result.path).relative_to(folder)): result for result in results}


def write(results: dict[str, Result], folder: Path) -> None:
    for name, result in results.items():
        (folder / name).write_text(result.after)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_re_exported_class_is_known(tmp_path: Path, jobs: int) -> None:
    """`from .compat import FSDP` means FSDP1 when compat gets it from there."""
    project(
        tmp_path,
        pkg__compat="from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n",
        pkg__train="""\
            from .compat import FSDP
            def train(model):
                model = FSDP(model)
                model.clip_grad_norm_(1.0)
        """,
    )

    after = run(tmp_path, jobs=jobs)["pkg/train.py"].after

    assert "fully_shard(model)" in after
    assert "clip_grad_norm_(model.parameters(), 1.0)" in after


def test_a_name_that_others_import_stays(tmp_path: Path) -> None:
    """An import that another file of the run takes from here is not removed."""
    project(
        tmp_path,
        a="""\
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            def build(model):
                return FSDP(model)
        """,
        b="""\
            from a import FSDP
            class Mine(FSDP):
                pass
        """,
    )

    results = run(tmp_path)

    assert "import FullyShardedDataParallel as FSDP, fully_shard" in results["a.py"].after
    assert "from a import FSDP" in results["b.py"].after


def test_models_are_followed_into_other_files(tmp_path: Path) -> None:
    """A function that is handed the model elsewhere saves it as FSDP2 does."""
    project(
        tmp_path,
        train="""\
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            from saving import save
            def main(model):
                model = FSDP(model)
                save(model, "x")
        """,
        saving="""\
            import torch
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            def save(model, path):
                torch.save(model.state_dict(), path)
        """,
    )

    after = run(tmp_path)["saving.py"].after

    assert "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))" in (
        after.replace("\n", "").replace("        ", "").replace("    ", "")
    )


def test_a_second_run_over_all_files_changes_nothing(tmp_path: Path) -> None:
    """Idempotence holds for a project as it does for a file."""
    test_models_are_followed_into_other_files(tmp_path)
    write(run(tmp_path), tmp_path)

    assert not any(result.changed for result in run(tmp_path).values())


def test_everything_waits_for_a_call_that_is_left(tmp_path: Path) -> None:
    """If the run's only FSDP call cannot be rewritten, its other files stay FSDP1's too."""
    project(
        tmp_path,
        wrap="""\
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            def wrap(model, **kwargs):
                return FSDP(model, **kwargs)
        """,
        use="""\
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            def check(model):
                assert isinstance(model, FSDP)
        """,
    )

    results = run(tmp_path)

    assert not results["use.py"].changed
    (site,) = results["use.py"].sites
    assert site.state == "skipped" and "wrap.py:3" in site.message
