"""What a tool may do to other people's files: as little as it must."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from fsdp_migrate.errors import Corrupt
from fsdp_migrate.rewrite import Options, rewrite_files, rewrite_source
from fsdp_migrate.rewrite.session import in_deep_stack
from fsdp_migrate.rewrite.source import Source

SCRIPT = dedent(
    '''\
    """A module."""
    import torch   # two blanks before this
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    x = { 'a':1 ,"b" : 2 }


    def build(model):
        # wrap it
        model = FSDP(model, use_orig_params=True)  # here
        y = """ text
          with odd   indentation"""
        return model


    class  Odd :
        z=1;w = 2
    '''
)


def test_only_edited_statements_change() -> None:
    """Every other line is byte for byte what it was."""
    before, after = SCRIPT.splitlines(), rewrite_source(SCRIPT).after.splitlines()

    assert [line for line in before if line not in after] == [
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
        "    model = FSDP(model, use_orig_params=True)  # here",
    ]
    assert [line for line in after if line not in before] == [
        "from torch.distributed.fsdp import fully_shard",
        "    fully_shard(model)  # here",
    ]


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_line_endings_survive(newline: str) -> None:
    """Windows files stay Windows files, new lines included."""
    text = SCRIPT.replace("\n", newline).replace(
        "use_orig_params", "mixed_precision=mp, forward_prefetch=True, use_orig_params"
    )

    after = rewrite_source(text).after

    assert after.count("\n") == after.count(newline)
    assert len(after.splitlines()) > len(text.splitlines())


def test_byte_order_mark_and_encoding_survive(tmp_path: Path) -> None:
    """A file is written back in its own encoding."""
    marked = tmp_path / "marked.py"
    marked.write_bytes(b"\xef\xbb\xbf" + SCRIPT.encode())
    latin = tmp_path / "latin.py"
    latin.write_bytes(f"# -*- coding: latin-1 -*-\n# gr\xfc\xdfe\n{SCRIPT}".encode("latin-1"))

    for path in (marked, latin):
        source = Source.read(path)
        source.write(path, rewrite_source(source.text).after)

    assert marked.read_bytes().startswith(b"\xef\xbb\xbf" + b'"""A module')
    assert "gr\xfc\xdfe" in latin.read_bytes().decode("latin-1")


def test_tabs_stay_tabs() -> None:
    """New lines are indented the way the file is."""
    text = (
        SCRIPT.replace("    ", "\t")
        .replace("use_orig_params=True", "auto_wrap_policy=ModuleWrapPolicy({Block})")
        .replace("import FullyS", "import ModuleWrapPolicy as _, FullyS")
    )
    text = f"from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n{text}"

    after = rewrite_source(text).after

    assert "\tfor module in reversed(list(model.modules())):\n\t\tif module" in after


def test_comments_of_a_rewritten_call_are_kept() -> None:
    """A comment inside a call that is rewritten moves above it; it is not lost."""
    text = dedent(
        """\
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        model = FSDP(
            model,
            # the limiter matters on A100
            limit_all_gathers=True,
            use_orig_params=True,  # for compile
        )
        """
    )

    after = rewrite_source(text).after

    assert "# the limiter matters on A100" in after
    assert "# for compile" in after


def test_statements_on_one_line_are_taken_apart_only_where_needed() -> None:
    """Semicolons and one-line suites hold what they held."""
    text = dedent(
        """\
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
        a = 1; model = FSDP(model, auto_wrap_policy=policy); b = 2
        if ready: model2 = FSDP(model2)
        """
    )

    after = rewrite_source(text).after

    assert "a = 1\n" in after and "\nb = 2\n" in after
    assert "if ready:\n    fully_shard(model2)\n" in after


def test_imports_stay_where_they_are() -> None:
    """A guarded or local import is edited in place and never hoisted."""
    text = dedent(
        """\
        try:
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        except ImportError:
            FSDP = None

        def build(model):
            from torch.distributed.fsdp import MixedPrecision
            return MixedPrecision(param_dtype=None)

        def wrap(model):
            return FSDP(model)
        """
    )

    after = rewrite_source(text).after

    assert "try:\n    from torch.distributed.fsdp import fully_shard\n" in after
    assert "    from torch.distributed.fsdp import MixedPrecisionPolicy\n" in after
    assert "    return fully_shard(model)\n" in after


def test_names_that_others_use_stay_imported() -> None:
    """`__all__`, a string annotation or getattr still need the old name."""
    text = dedent(
        """\
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        __all__ = ["FSDP"]
        model = FSDP(model)
        """
    )

    assert "FullyShardedDataParallel as FSDP" in rewrite_source(text).after


@pytest.mark.parametrize(
    ("comment", "skipped"),
    [
        ("  # fsdp-migrate: skip", True),
        ("  # fsdp-migrate: skip[wrap-call]", True),
        ("  # fsdp-migrate: skip[no-sync]", False),
        ("  # skip", False),
    ],
)
def test_a_comment_keeps_the_tool_away(comment: str, skipped: bool) -> None:
    """The user has the last word over a line."""
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        f"model = FSDP(model){comment}\n"
    )

    result = rewrite_source(text)

    assert (result.after == text) == skipped
    assert [site.state for site in result.sites] == ["skipped" if skipped else "rewritten"]


def test_a_comment_above_a_statement_counts_for_it() -> None:
    """A skip comment of its own is about the statement below."""
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "# fsdp-migrate: skip\n"
        "model = FSDP(\n    model,\n)\n"
    )

    assert rewrite_source(text).after == text


def test_a_whole_file_can_be_skipped() -> None:
    """One comment takes a file out, and the report still names its uses."""
    text = f"# fsdp-migrate: skip-file\n{SCRIPT}"

    result = rewrite_source(text)

    assert result.after == text
    assert {site.state for site in result.sites} == {"skipped"}


def test_a_broken_file_does_not_stop_the_others(tmp_path: Path) -> None:
    """Each file stands for itself."""
    (tmp_path / "broken.py").write_text("from torch.distributed.fsdp import (\n")
    (tmp_path / "fine.py").write_text(SCRIPT)
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00fsdp")

    results = {Path(result.path).name: result for result in rewrite_files([tmp_path])}

    assert results["broken.py"].error is not None
    assert results["binary.py"].error is not None
    assert results["fine.py"].changed


def test_source_that_is_no_python_is_an_error() -> None:
    """The text entry point says so by an exception."""
    with pytest.raises(Corrupt, match="not valid Python"):
        rewrite_source("import fsdp (")


def test_deep_and_long_files_do_not_crash() -> None:
    """Thousands of concatenated strings or nested brackets are ordinary data files."""
    strings = "(" + "\n".join(f'"fsdp {number}"' for number in range(3000)) + ")"
    sums = " + ".join(["fsdp"] * 2000)
    nested = "[" * 80 + "]" * 80
    text = f"{SCRIPT}\ndata = {strings}\ntotal = {sums}\nlist = {nested}\n"

    result = in_deep_stack(lambda: rewrite_source(text))

    assert "fully_shard(model)" in result.after


def test_a_marker_stands_once() -> None:
    """A use that is left keeps one marker however often the tool runs."""
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "model = FSDP(model, **unknown)\n"
    )
    once = rewrite_source(text).after

    assert once.count("# TODO(fsdp-migrate): wrap-call ") == 1
    assert rewrite_source(once).after == once


def test_nothing_is_left_half_migrated() -> None:
    """While the only FSDP call is left, what handles its model stays FSDP1's as well."""
    text = dedent(
        """\
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

        mp = MixedPrecision(param_dtype=dtype)
        model = FSDP(model, mixed_precision=mp, **unknown)
        assert isinstance(model, FSDP)
        """
    )

    result = rewrite_source(text)

    assert [line for line in result.after.splitlines() if "TODO" not in line] == text.splitlines()
    assert sorted(site.state for site in result.sites) == ["skipped", "todo"]


def test_rules_can_be_chosen() -> None:
    """`select` and `ignore` work on names of rules; an ignored argument leaves its whole call."""
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision\n"
        "mp = MixedPrecision(param_dtype=dtype)\n"
        "assert isinstance(model, FSDP)\n"
    )

    only = rewrite_source(text, Options(select=("model-type",))).after
    without = rewrite_source(text, Options(ignore=("model-type", "leftovers"))).after

    assert "MixedPrecision(param_dtype" in only and "isinstance(model, FSDPModule)" in only
    assert "MixedPrecisionPolicy(" in without and "isinstance(model, FSDP)" in without


def test_the_target_version_decides_what_is_emitted() -> None:
    """Older torch has fully_shard elsewhere; newer torch can ignore parameters."""
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "model = FSDP(model, ignored_modules=[model.head])\n"
    )

    assert "TODO" in rewrite_source(text).after
    assert "ignored_params=" in rewrite_source(text, Options(target_torch=(2, 7))).after
    old = rewrite_source(text.replace("[model.head]", "None"), Options(target_torch=(2, 4))).after
    assert "from torch.distributed._composable.fsdp import fully_shard" in old
