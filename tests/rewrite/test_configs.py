"""Configuration files: what they mean afterwards is asked of the libraries that read them."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
import tomlkit
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_migrate.rewrite.configs import mark_python, report_python, rewrite
from fsdp_migrate.rewrite.options import Options
from fsdp_migrate.rewrite.report import Result


def text(source: str) -> str:
    return textwrap.dedent(source).lstrip("\n")


def run(path: str, source: str, **options: Any) -> Result:
    """Rewrite, and hold every run to what is asked of all of them."""
    result = rewrite(path, source, Options(**options))
    again = rewrite(path, result.after, Options(**options))
    assert again.after == result.after, "a second run must change nothing"
    lines = source.splitlines()
    assert all(1 <= site.line <= len(lines) for site in result.sites)
    return result


def states(result: Result) -> dict[str, str]:
    return {site.api: site.state for site in result.sites}


ACCELERATE = text("""
    compute_environment: LOCAL_MACHINE
    debug: false
    # one cluster, two nodes
    distributed_type: FSDP
    downcast_bf16: 'no'
    fsdp_config:
      fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
      fsdp_backward_prefetch: BACKWARD_PRE   # the fast one
      fsdp_cpu_ram_efficient_loading: true
      fsdp_forward_prefetch: false
      fsdp_offload_params: false
      # 1 is FULL_SHARD
      fsdp_sharding_strategy: STRATEGY  # see above
      fsdp_state_dict_type: SHARDED_STATE_DICT
      fsdp_sync_module_states: true
      fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
      fsdp_use_orig_params: true
    machine_rank: 0
    main_training_function: main
    mixed_precision: bf16
    num_machines: 2
    num_processes: 16
    rdzv_backend: static
    same_network: true
    use_cpu: false
""")


class TestAccelerate:
    @pytest.mark.parametrize(
        ("strategy", "reshard"),
        [("FULL_SHARD", True), ("1", True), ("SHARD_GRAD_OP", False), ("full_shard", True)],
    )
    def test_agrees_with_accelerates_own_converter_where_that_is_right(self, strategy, reshard):
        """Same mapping as `accelerate to-fsdp2`, for the strategies that are a boolean."""
        from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

        before = ACCELERATE.replace("STRATEGY", strategy, 1).replace("SHARDED_STRATEGY", "SHARDED")
        result = run("default_config.yaml", before)

        expected = convert_config_to_fsdp2(yaml.safe_load(before))
        expected["fsdp_config"]["fsdp_reshard_after_forward"] = reshard
        assert yaml.safe_load(result.after) == expected

    def test_only_edited_lines_change(self):
        """Comments, order, quotes and blank places of all other lines survive."""
        before = ACCELERATE.replace("STRATEGY", "SHARD_GRAD_OP", 1)
        result = run("a.yaml", before)

        kept = [line for line in before.splitlines() if line in result.after.splitlines()]
        new = [line for line in result.after.splitlines() if line not in before.splitlines()]
        assert len(before.splitlines()) - len(kept) == 5
        assert new == ["  fsdp_reshard_after_forward: false  # see above", "  fsdp_version: 2"]
        assert "  # 1 is FULL_SHARD" in kept

    def test_hybrid_shard_keeps_its_mesh(self):
        """accelerate's converter forgets the replicas; they are the machines."""
        from accelerate.commands.config.config_args import ClusterConfig
        from accelerate.parallelism_config import ParallelismConfig

        result = run("a.yaml", ACCELERATE.replace("STRATEGY", "HYBRID_SHARD", 1))

        config = ClusterConfig(**yaml.safe_load(result.after))
        sizes = {
            key.removeprefix("parallelism_config_"): value
            for key, value in config.parallelism_config.items()
        }
        mesh = ParallelismConfig(**sizes)
        assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (2, 8)
        assert config.fsdp_config["fsdp_reshard_after_forward"] is True
        assert states(result)["fsdp_sharding_strategy"] == "differs"

    def test_hybrid_zero2_does_not_reshard(self):
        result = run("a.yaml", ACCELERATE.replace("STRATEGY", "HYBRID_SHARD_ZERO2", 1))

        assert yaml.safe_load(result.after)["fsdp_config"]["fsdp_reshard_after_forward"] is False

    def test_hybrid_shard_on_one_machine_is_full_shard(self):
        before = ACCELERATE.replace("STRATEGY", "HYBRID_SHARD", 1)
        result = run("a.yaml", before.replace("num_machines: 2", "num_machines: 1"))

        after = yaml.safe_load(result.after)
        assert after["fsdp_config"]["fsdp_reshard_after_forward"] is True
        assert "parallelism_config" not in after

    @pytest.mark.parametrize(
        ("strategy", "replace"),
        [
            ("NO_SHARD", ("", "")),
            ("3", ("", "")),
            ("HYBRID_SHARD", ("num_machines: 2\n", "")),
            ("HYBRID_SHARD", ("num_processes: 16", "num_processes: 15")),
            ("SOME_SHARD", ("", "")),
        ],
    )
    def test_what_cannot_be_said_leaves_the_file_with_one_marker(self, strategy, replace):
        """Nothing but a comment changes; NO_SHARD never becomes a sharding configuration."""
        before = ACCELERATE.replace("STRATEGY", strategy, 1).replace(*replace)
        result = run("a.yaml", before)

        assert yaml.safe_load(result.after) == yaml.safe_load(before)
        assert result.after.count("TODO(fsdp-migrate): accelerate-config") == 1
        assert states(result)["fsdp_sharding_strategy"] == "todo"
        assert set(states(result).values()) == {"todo", "skipped"}

    def test_defaults_that_changed_are_written_out(self):
        """Without a state dict type FSDP1 saved full ones; FSDP2 would save sharded ones."""
        source = text("""
            distributed_type: FSDP
            fsdp_config: {fsdp_sharding_strategy: 2, fsdp_use_orig_params: false}
            num_machines: 1""")
        result = run("a.yaml", source)

        assert yaml.safe_load(result.after)["fsdp_config"] == {
            "fsdp_reshard_after_forward": False,
            "fsdp_version": 2,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }
        assert states(result)["fsdp_use_orig_params"] == "differs"

    def test_json_stays_json(self):
        config = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_backward_prefetch": "NO_PREFETCH", "fsdp_sharding_strategy": 1},
        }
        result = run("a.json", json.dumps(config, indent="\t"))

        assert json.loads(result.after)["fsdp_config"] == {
            "fsdp_reshard_after_forward": True,
            "fsdp_version": 2,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }

    @pytest.mark.parametrize(
        "source",
        [
            "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  use_orig_params: true\n",
            "distributed_type: FSDP\nfsdp_config: {}\n",
        ],
    )
    def test_what_is_not_fsdp1_is_left(self, source):
        assert run("a.yaml", source).after == source

    def test_a_deselected_rule_changes_nothing(self):
        before = ACCELERATE.replace("STRATEGY", "FULL_SHARD", 1)

        assert run("a.yaml", before, ignore=("accelerate-config",)).after == before


DEAD = {
    "fsdp_backward_prefetch": ["BACKWARD_PRE", "NO_PREFETCH"],
    "fsdp_forward_prefetch": ["true", "false"],
    "fsdp_limit_all_gathers": ["true"],
    "fsdp_sync_module_states": ["true", "false"],
    "fsdp_use_orig_params": ["true", "false"],
}
KEPT = {
    "fsdp_activation_checkpointing": ["true", "false"],
    "fsdp_cpu_ram_efficient_loading": ["true", "false"],
    "fsdp_min_num_params": ["2000"],
    "fsdp_offload_params": ["false"],
    "fsdp_transformer_layer_cls_to_wrap": ["Block", "'Block,Other'"],
}


@st.composite
def fsdp_settings(draw: st.DrawFn) -> dict[str, str]:
    names = draw(st.lists(st.sampled_from([*DEAD, *KEPT]), unique=True, max_size=8))
    values = {name: draw(st.sampled_from((DEAD | KEPT)[name])) for name in names}
    if draw(st.booleans()):
        values["fsdp_sharding_strategy"] = draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP"]))
    return dict(draw(st.permutations(list(values.items()))))


@given(
    values=fsdp_settings(),
    comments=st.lists(st.sampled_from(["", "  # why", "   #x: y"]), min_size=12, max_size=12),
    newline=st.sampled_from(["\n", "\r\n"]),
    indent=st.sampled_from(["  ", "    "]),
    final_newline=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_settings_in_any_layout(values, comments, newline, indent, final_newline):
    """Whatever stands where: the meaning is the expected one, and no other line is touched."""
    lines = ["distributed_type: FSDP", "fsdp_config:" + comments[-1]]
    for (key, value), comment in zip(values.items(), comments, strict=False):
        lines += [f"{indent}# about {key}", f"{indent}{key}: {value}{comment}"]
    before = newline.join(["num_machines: 1", *lines]) + newline * final_newline
    result = run("a.yaml", before)
    if not values:
        assert result.after == before
        return

    expected: dict[str, Any] = {
        key: yaml.safe_load(value) for key, value in values.items() if key in KEPT
    }
    if "fsdp_sharding_strategy" in values:
        expected["fsdp_reshard_after_forward"] = values["fsdp_sharding_strategy"] == "FULL_SHARD"
    expected |= {"fsdp_version": 2, "fsdp_state_dict_type": "FULL_STATE_DICT"}
    assert yaml.safe_load(result.after)["fsdp_config"] == expected
    comment_lines = [line for line in before.split(newline) if line.strip().startswith("#")]
    assert [n for n in result.after.split(newline) if n.strip().startswith("#")] == comment_lines
    assert result.after.count("\n") == result.after.count(newline)
    assert set(states(result)) >= set(values) & set(DEAD)


class TestAxolotl:
    def test_the_list_of_words_becomes_settings_without_prefix(self):
        before = text("""
            base_model: some/model   # 8B
            fsdp:
              - full_shard
              - auto_wrap
            fsdp_config:
              # offload hurts
              fsdp_offload_params: false
              fsdp_sync_module_states: true
              fsdp_cpu_ram_efficient_loading: true
              fsdp_use_orig_params: true
              fsdp_state_dict_type: FULL_STATE_DICT
              fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
            fsdp_final_state_dict_type: SHARDED_STATE_DICT
            special_tokens:
              pad_token: "<|end|>"
            """)
        result = run("train.yml", before)

        assert result.after == text("""
            base_model: some/model   # 8B
            fsdp_version: 2
            fsdp_config:
              # offload hurts
              offload_params: false
              cpu_ram_efficient_loading: true
              state_dict_type: FULL_STATE_DICT
              transformer_layer_cls_to_wrap: LlamaDecoderLayer
              reshard_after_forward: true
              auto_wrap_policy: TRANSFORMER_BASED_WRAP
              final_state_dict_type: SHARDED_STATE_DICT
            special_tokens:
              pad_token: "<|end|>"
            """)
        assert set(states(result).values()) == {"rewritten"}

    def test_words_alone_get_a_mapping(self):
        result = run("a.yml", "base_model: x\nfsdp: [shard_grad_op, auto_wrap, offload]\n")

        assert yaml.safe_load(result.after) == {
            "base_model": "x",
            "fsdp_version": 2,
            "fsdp_config": {
                "reshard_after_forward": False,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "offload_params": True,
            },
        }

    @pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
    def test_a_mesh_that_the_file_does_not_give_is_a_question(self, strategy):
        before = f"base_model: x\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\n"
        result = run("a.yml", before)

        assert yaml.safe_load(result.after) == yaml.safe_load(before)
        assert states(result)["fsdp_sharding_strategy"] == "todo"

    def test_hybrid_with_its_degrees_is_rewritten(self):
        before = text("""
            base_model: x
            dp_replicate_size: 2
            dp_shard_size: 4
            fsdp_config:
              fsdp_sharding_strategy: HYBRID_SHARD
            """)
        result = run("a.yml", before)

        assert yaml.safe_load(result.after)["fsdp_config"] == {"reshard_after_forward": True}
        assert yaml.safe_load(result.after)["fsdp_version"] == 2

    def test_an_unknown_setting_is_a_question(self):
        """axolotl drops what it does not know in silence; this must not."""
        result = run("a.yml", "base_model: x\nfsdp_config:\n  fsdp_colour: red\n")

        assert states(result)["fsdp_colour"] == "todo"

    def test_aliases_are_written_out_where_they_are_edited(self):
        before = text("""
            defaults: &kind FULL_SHARD
            base_model: x
            fsdp_config:
              fsdp_sharding_strategy: *kind
              fsdp_offload_params: false
            """)
        result = run("a.yml", before)

        after = yaml.safe_load(result.after)
        assert after["fsdp_config"] == {"reshard_after_forward": True, "offload_params": False}
        assert after["defaults"] == "FULL_SHARD"


class TestTransformers:
    def plugin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What transformers itself reads from these arguments."""
        from transformers import TrainingArguments

        fsdp = {key: arguments[key] for key in ("fsdp", "fsdp_config")}
        return TrainingArguments(output_dir="x", use_cpu=True, **fsdp).fsdp_plugin_args

    def test_transformers_reads_fsdp2_from_the_result(self):
        before = text("""
            output_dir: out
            learning_rate: 1.0e-4
            fsdp: "full_shard auto_wrap offload"   # all of it
            fsdp_config:
              backward_prefetch: "backward_pre"
              transformer_layer_cls_to_wrap: [LlamaDecoderLayer]
              use_orig_params: true
              limit_all_gathers: true
            """)
        result = run("args.yaml", before)

        read = self.plugin(yaml.safe_load(result.after))
        assert read["fsdp_version"] == 2
        assert read["reshard_after_forward"] is True
        assert read["cpu_offload"] is True
        assert read["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
        assert read["transformer_cls_names_to_wrap"] == "LlamaDecoderLayer"
        assert "# all of it" in result.after

    def test_words_without_auto_wrap_wrap_the_root_only(self):
        before = {
            "output_dir": "out",
            "fsdp": "shard_grad_op",
            "fsdp_config": {"limit_all_gathers": True},
        }
        result = run("args.json", json.dumps(before))

        read = self.plugin(json.loads(result.after))
        assert read["reshard_after_forward"] is False
        assert read["auto_wrap_policy"] == "NO_WRAP"

    def test_wrapping_by_size_stays_wrapping_by_size(self):
        before = {"output_dir": "out", "fsdp": "full_shard auto_wrap"}
        before["fsdp_config"] = {"min_num_params": 1000, "forward_prefetch": False}
        result = run("args.json", json.dumps(before, indent=2))

        read = self.plugin(json.loads(result.after))
        assert read["auto_wrap_policy"] == "SIZE_BASED_WRAP"
        assert read["min_num_params"] == 1000

    @pytest.mark.parametrize("indent", [None, 1, 4, "\t"])
    @pytest.mark.parametrize(
        "before",
        [
            {"backward_prefetch": "backward_pre", "limit_all_gathers": True},
            {"fsdp_transformer_layer_cls_to_wrap": ["Block"], "forward_prefetch": False},
            {"xla": False, "backward_prefetch": "x", "fsdp_min_num_params": 0},
        ],
    )
    def test_a_file_of_settings_alone(self, before, indent):
        """The file that --fsdp_config names; nothing may be left but valid JSON."""
        result = run("fsdp_config.json", json.dumps(before, indent=indent))

        after = json.loads(result.after)
        assert after.pop("version") == 2
        assert after == {k: v for k, v in before.items() if "prefetch" not in k and "all" not in k}

    @pytest.mark.parametrize("words", ["hybrid_shard auto_wrap", "no_shard", "full_shrad"])
    def test_what_has_no_setting_is_a_question(self, words):
        before = f"output_dir: x\nfsdp: {words}\nfsdp_config:\n  use_orig_params: true\n"
        result = run("a.yaml", before)

        assert yaml.safe_load(result.after) == yaml.safe_load(before)
        assert states(result)["fsdp"] == "todo"

    def test_torch_xla_is_left(self):
        before = json.dumps({"fsdp_transformer_layer_cls_to_wrap": ["B"], "xla": True})
        result = run("xla.json", before)

        assert not result.changed
        assert [site.state for site in result.sites] == ["skipped"]


class TestTorchtitan:
    TITAN = text("""
        [job]
        dump_folder = "out"  # here

        [model]
        flavor = "8B"

        [training]
          data_parallel_degree = DEGREE   # all ranks
        data_parallel_type = "KIND"
        sharding_strategy = 'STRATEGY'
        steps = 10
        """)

    def titan(self, degree: str, kind: str, strategy: str, extra: str = "") -> Result:
        source = self.TITAN.replace("DEGREE", degree).replace("KIND", kind)
        return run("llama.toml", source.replace("STRATEGY", strategy) + extra)

    @pytest.mark.parametrize(
        ("strategy", "reshard"), [("FULL_SHARD", "default"), ("SHARD_GRAD_OP", "never")]
    )
    def test_degrees_and_resharding(self, strategy, reshard):
        result = self.titan("-1", "fsdp", strategy)

        assert tomlkit.parse(result.after)["training"].unwrap() == {
            "data_parallel_shard_degree": -1,
            "fsdp_reshard_after_forward": reshard,
            "steps": 10,
        }
        assert "  data_parallel_shard_degree = -1   # all ranks\n" in result.after
        assert 'dump_folder = "out"  # here' in result.after

    def test_no_shard_is_replicas_without_shards(self):
        after = tomlkit.parse(self.titan("8", "fsdp", "NO_SHARD").after)["training"].unwrap()

        assert after["data_parallel_replicate_degree"] == 8
        assert after["data_parallel_shard_degree"] == 1
        assert "fsdp_reshard_after_forward" not in after

    def test_hybrid_with_its_replicas(self):
        result = self.titan("4", "fsdp", "HYBRID_SHARD", "data_parallel_replicate_degree = 2\n")

        after = tomlkit.parse(result.after)["training"].unwrap()
        assert after["data_parallel_replicate_degree"] == 2
        assert after["data_parallel_shard_degree"] == 4
        assert after["fsdp_reshard_after_forward"] == "default"

    @pytest.mark.parametrize(
        ("degree", "kind", "strategy"),
        [("-1", "fsdp", "NO_SHARD"), ("4", "fsdp", "HYBRID_SHARD"), ("-1", "ddp", "FULL_SHARD")],
    )
    def test_a_number_that_the_file_does_not_give_is_a_question(self, degree, kind, strategy):
        result = self.titan(degree, kind, strategy)
        before = tomlkit.parse(result.before).unwrap()

        assert tomlkit.parse(result.after).unwrap() == before
        assert "todo" in states(result).values()
        assert result.after.count("TODO(fsdp-migrate)") == 1

    def test_any_other_toml_is_left(self):
        source = "[tool.x]\ndata_parallel_type = 'fsdp'\n"

        assert run("pyproject.toml", source).sites == ()


class TestCommand:
    """Configuration files go through `rewrite-code` as any other file does."""

    def invoke(self, *arguments: str) -> Any:
        from typer.testing import CliRunner

        from fsdp_migrate.cli import app

        return CliRunner().invoke(app, ["rewrite-code", *arguments])

    def test_a_folder_is_searched_for_them(self, tmp_path):
        (tmp_path / "conf").mkdir()
        config = tmp_path / "conf" / "fsdp.yaml"
        config.write_bytes(ACCELERATE.replace("STRATEGY", "FULL_SHARD", 1).encode())
        (tmp_path / "run.sh").write_text("accelerate launch --use_fsdp x.py\n")
        (tmp_path / "data.json").write_text(json.dumps(["fsdp"] * 10))
        (tmp_path / "demo.ipynb").write_text('{"cells": ["import torch.distributed.fsdp"]}')
        result = self.invoke("--write", "--json", str(tmp_path))

        report = json.loads(result.stdout)
        assert result.exit_code == 0
        assert {site["rule"] for site in report["sites"]} == {
            "accelerate-config",
            "launch-arguments",
            "notebook",
        }
        assert yaml.safe_load(config.read_text())["fsdp_config"]["fsdp_version"] == 2
        assert self.invoke("--check", str(tmp_path)).exit_code == 5  # the shell script is left

    def test_rules_are_listed_and_explained(self):
        assert "axolotl-config" in self.invoke("--list-rules").stdout
        assert "ParallelismConfig" in self.invoke("--explain", "transformers-config").stdout
        assert self.invoke("--select", "torchtitan-config", "x.toml").exit_code == 3
        assert self.invoke("--select", "torchtitan", ".").exit_code == 2

    def test_a_python_file_gets_the_rules_for_code_and_the_report(self, tmp_path):
        path = tmp_path / "main.py"
        path.write_text(
            "from lightning.pytorch.strategies import FSDPStrategy\n"
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
            "model = FSDP(model)\n"
            "strategy = FSDPStrategy()\n"
        )
        report = json.loads(self.invoke("--write", "--json", str(path)).stdout)

        assert [site["line"] for site in report["sites"]] == [3, 4]
        assert "fully_shard(model)" in path.read_text()
        assert path.read_text().count("# TODO(fsdp-migrate): lightning-strategy") == 1
        assert not json.loads(self.invoke("--json", str(path)).stdout)["files"][0]["changed"]

    def test_a_skipped_line_or_file_is_skipped(self, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_text("# fsdp-migrate: skip-file\n" + ACCELERATE)

        assert json.loads(self.invoke("--json", str(path)).stdout)["sites"] == []


class TestReports:
    def test_shell_arguments_are_reported_with_what_replaces_them(self):
        source = text("""
            #!/bin/bash
            # --fsdp in a comment is none
            torchrun train.py --fsdp "full_shard auto_wrap offload" \\
              --fsdp_config=cfg.json --lr 1
            accelerate launch --use_fsdp --fsdp_sharding_strategy NO_SHARD \\
              --fsdp_use_orig_params true --fsdp_offload_params false x.py
            export FSDP_SHARDING_STRATEGY=2
            """)
        result = run("run.sh", source)

        assert not result.changed
        assert [(site.line, site.api, site.state) for site in result.sites] == [
            (3, "--fsdp", "todo"),
            (4, "--fsdp_config", "skipped"),
            (5, "--use_fsdp", "todo"),
            (5, "--fsdp_sharding_strategy", "todo"),
            (6, "--fsdp_use_orig_params", "todo"),
            (6, "--fsdp_offload_params", "skipped"),
            (7, "FSDP_SHARDING_STRATEGY", "todo"),
        ]
        assert "cpu_offload: true" in result.sites[0].message
        assert "--fsdp_reshard_after_forward false" in result.sites[-1].message

    def test_python_arguments_are_reported(self):
        source = text("""
            import transformers as hf
            from accelerate import FullyShardedDataParallelPlugin
            plain = hf.TrainingArguments("out")
            off = hf.TrainingArguments("out", fsdp="")
            new = hf.TrainingArguments("out", fsdp=True, fsdp_config={"version": 2})
            old = hf.TrainingArguments("out", fsdp="full_shard auto_wrap")
            plugin = FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")
            plugin2 = FullyShardedDataParallelPlugin(fsdp_version=2)
            nothing, none = [], ()
            command = ["torchrun", "t.py", "--fsdp", "full_shard", "--lr", "1"]
            """)
        found = report_python("a.py", source, Options())

        assert [(site.line, site.state) for site in found] == [
            (6, "todo"),
            (7, "todo"),
            (9, "todo"),
        ]

    def test_lightning_gets_a_marker_and_a_sketch_once(self):
        source = text("""
            import lightning as L
            from lightning.pytorch.strategies import FSDPStrategy

            def main():
                strategy = FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="SHARD_GRAD_OP")
                return L.Trainer(strategy=strategy), L.Trainer(strategy="ddp")
            """)
        once = mark_python(source, Options())

        assert [site.line for site in report_python("a.py", source, Options())] == [5]
        assert "    #         for module in reversed(list(self.modules())):\n" in once
        assert "isinstance(module, (Block,))" in once
        assert "reshard_after_forward=False" in once
        assert mark_python(once, Options()) == once
        assert "".join(n for n in once.splitlines(True) if "#" not in n) == source

    def test_a_local_class_of_the_same_name_is_not_lightnings(self):
        source = "class FSDPStrategy: ...\ns = FSDPStrategy()\n"

        assert mark_python(source, Options()) == source
        assert report_python("a.py", source, Options()) == []

    def test_settings_of_unknown_projects_are_named_and_left(self):
        source = "max_duration: 3ba\nfsdp_config:\n  sharding_strategy: FULL_SHARD\n"
        result = run("composer.yaml", source)

        assert not result.changed
        assert [(site.line, site.state) for site in result.sites] == [(2, "skipped")]

    @pytest.mark.parametrize(
        ("path", "source"),
        [("a.yaml", "fsdp: [1,\n"), ("a.json", '{"fsdp": }'), ("a.toml", "fsdp = = 1\n")],
    )
    def test_a_file_that_does_not_parse_is_an_error_of_that_file(self, path, source):
        result = run(path, source)

        assert result.error and path in result.error
        assert not result.changed
