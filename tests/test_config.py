"""Config: reading a folder, changing options, and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, ConfigError, ExlmError, InputError, Model, ModelNotFound, Tokenizer
from tests import tiny
from tests.checkpoint import gguf_models
from tests.families.test_config_reader import LLAMA


def make_folder(path: Path, generation: object = None, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_reads_the_folder_at_once(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2))
    assert (config.architecture, config.max_seq_len, config.hidden_size) == ("LlamaForCausalLM", 4096, 64)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4, 8, 2)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (8, 128, 100)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)
    assert config.max_batch_size == 1
    assert config.max_input_len == 2048
    assert config.vision_model_type is None
    assert config.arch.lm.requires_bos is False


def test_reads_the_folder_later(tmp_path: Path) -> None:
    config = Config()
    config.model_dir = str(make_folder(tmp_path))
    config.prepare()
    assert config.hidden_size == 64


def test_a_relative_path_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_chat_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    config = Config("m")
    later = Config()
    later.model_dir = "m"
    monkeypatch.chdir("/")
    with pytest.raises(ModelNotFound, match="Can't find m: no such file or folder"):
        later.prepare()
    assert config.model_dir == str(tmp_path / "m")
    assert config.freeze().path == tmp_path / "m"
    assert Tokenizer(config).encode("a").shape == (1, 1)
    Model(config).load()


def test_preparing_again_restores_the_models_own_values(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path))
    config.max_seq_len, config.scale_alpha_value = 99, 2.0
    config.prepare()
    assert (config.max_seq_len, config.scale_alpha_value) == (2048, 1.0)


def test_all_eos_ids_are_read(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path, {"eos_token_id": [2, 7, 9]}, eos_token_id=[7, 8]))
    assert config.eos_token_id == 7
    assert config.eos_token_ids == [7, 8, 2, 9]
    assert config.generation_config == {"eos_token_id": [2, 7, 9]}


def test_an_id_below_zero_is_none(tmp_path: Path) -> None:
    config = Config(tiny.make(tmp_path, eos_token_id=[-1, 7], pad_token_id=-1, bos_token_id=-1))
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == ([7], None, None)
    assert Config(tiny.make(tmp_path, eos_token_id=-1)).eos_token_id is None


def test_both_names_of_the_dtype(tmp_path: Path) -> None:
    assert Config(make_folder(tmp_path, torch_dtype="bfloat16")).stored_dtype == "bfloat16"
    assert Config(make_folder(tmp_path, dtype="float16")).stored_dtype == "float16"


def test_overrides_reach_the_frozen_description(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path))
    config.max_seq_len, config.scale_alpha_value, config.scale_pos_emb = 8192, 2.5, 2.0
    config.rotary_embedding_base = 1e6
    frozen = config.freeze()
    rope = frozen.spec.attentions[0].rope
    assert rope is not None
    assert (frozen.max_seq_len, rope.ntk_alpha, rope.linear_factor, rope.theta) == (8192, 2.5, 2.0, 1e6)


def test_the_files_linear_scaling_is_visible_and_can_be_replaced(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}))
    assert config.scale_pos_emb == 4.0
    config.scale_pos_emb = 1.0
    rope = config.freeze().spec.attentions[0].rope
    assert rope is not None
    assert rope.scaling is None
    assert rope.linear_factor == 1.0


def test_a_misspelt_option_is_an_error(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path))
    with pytest.raises(AttributeError, match=r"'max_seqlen'\. Did you mean 'max_seq_len'"):
        config.max_seqlen = 4096


@pytest.mark.parametrize("nothing", [None, 0, 0.0])
def test_none_and_zero_mean_no_scaling(tmp_path: Path, nothing: float | None) -> None:
    config = Config(make_folder(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}))
    config.scale_pos_emb = config.scale_alpha_value = nothing
    rope = config.freeze().spec.attentions[0].rope
    assert rope is not None
    assert (rope.scaling, rope.linear_factor, rope.ntk_alpha) == (None, 1.0, 1.0)


def test_unknown_attributes_of_old_programs_are_kept_with_a_warning(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path))
    for name in ("max_attn_size", "no_flash_attn_cross", "embed_cpu", "rope_alpha", "use_tensorizer"):
        with pytest.warns(UserWarning, match=f"no option '{name}': it is kept, and nothing reads it"):
            setattr(config, name, 2048**2)
        setattr(config, name, 3)  # said once
        assert getattr(config, name) == 3
    config.freeze()
    with pytest.raises(AttributeError, match="vocab_size says what the model is"):
        config.vocab_size = 3  # type: ignore[misc]


def test_low_memory(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path))
    config.max_output_len = 4096
    config.set_low_mem()
    assert (config.max_input_len, config.max_attention_size, config.max_output_len) == (1024, 1024**2, 1024)
    config.arch_compat_overrides(quiet=True)


@pytest.mark.parametrize("name", ["max_seq_len", "max_batch_size", "max_input_len", "max_attention_size"])
@pytest.mark.parametrize("value", [0, -5, 1.5, True, "8"])
def test_invalid_options_are_refused(tmp_path: Path, name: str, value: object) -> None:
    config = Config(make_folder(tmp_path))
    setattr(config, name, value)
    with pytest.raises(InputError, match=f"config.{name} must be a whole number"):
        config.freeze()


@pytest.mark.parametrize("value", [0, 4, 32, "8", None])
def test_activations_on_a_cpu_have_16_or_8_bits(tmp_path: Path, value: object) -> None:
    config = Config(make_folder(tmp_path))
    assert config.freeze().cpu_activation_bits == 16
    config.cpu_activation_bits = 8
    assert config.freeze().cpu_activation_bits == 8
    config.cpu_activation_bits = value  # type: ignore[assignment]
    with pytest.raises(InputError, match="cpu_activation_bits must be 16 or 8, found"):
        config.freeze()


@pytest.mark.parametrize("name", ["scale_pos_emb", "scale_alpha_value", "yarn_rope_factor"])
def test_options_that_are_not_numbers_are_refused(tmp_path: Path, name: str) -> None:
    config = Config(make_folder(tmp_path))
    setattr(config, name, "2")
    with pytest.raises(InputError, match=f"config.{name} must be .*, found '2'"):
        config.freeze()


def test_torch_devices_and_dtypes_are_accepted(tmp_path: Path) -> None:
    config: Any = Config(make_folder(tmp_path))
    config.device, config.dtype = torch.device("cuda", 1), torch.float16
    frozen = config.freeze()
    assert (frozen.device, frozen.dtype) == ("cuda:1", "torch.float16")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_an_invalid_rope_base_is_refused(tmp_path: Path, value: float) -> None:
    config = Config(make_folder(tmp_path))
    config.rotary_embedding_base = value
    with pytest.raises(InputError, match=r"config\.rotary_embedding_base must be a number above 0"):
        config.freeze()


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        Config(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config.json: not a model folder \(it holds nothing\)"):
        Config(tmp_path)
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"only a \.gguf file"):
        Config(file)
    with pytest.raises(ModelNotFound, match="cannot be looked at"):
        Config("~no-such-user/model")
    with pytest.raises(ModelNotFound, match=r"cannot be looked at \(File name too long\)"):
        Config("x" * 5000)
    with pytest.raises(AssertionError, match="Can't find"):  # as old scripts catch it
        Config(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="No model_dir"):
        Config().prepare()
    with pytest.raises(ConfigError, match="No model has been read"):
        _ = Config().spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object"),
        ("\ufeff{}", "exactly one name"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Config(tmp_path)


def test_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="not valid JSON"):
        Config(tmp_path)


def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    make_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(ConfigError, match=r"config\.json cannot be read \(Permission denied\)"):
            Config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        with pytest.raises(ModelNotFound, match=r"cannot be looked at \(Permission denied\)"):
            Config(tmp_path)


def test_a_gguf_file_takes_precedence_over_a_stub_config(tmp_path: Path) -> None:
    """Folders of GGUF files on the Hub often hold a config.json of one line."""
    gguf_models.write_model(tmp_path / "x.Q8_0.gguf", "llama")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = Config(tmp_path)
    assert config.hidden_size == 64
    assert config.freeze().path == tmp_path / "x.Q8_0.gguf"
    gguf_models.write_model(tmp_path / "x.Q4_0.gguf", "llama")
    with pytest.raises(ModelNotFound, match="holds 2 GGUF models"):
        Config(tmp_path)
    tiny.make(tmp_path)
    assert Config(tmp_path).hidden_size == 32


def test_older_files_beside_config_json(tmp_path: Path) -> None:
    config = Config(make_folder(tmp_path))
    assert config.freeze().quantization is None
    (tmp_path / "quant_config.json").write_text('{"backend": "other"}')
    assert config.freeze().quantization is None
    awq = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(awq))
    found = config.freeze().quantization
    assert found is not None
    assert (found.method, found.bits, found.group_size) == ("awq", 4, 64)
    (tmp_path / "quantize_config.json").write_text('{"bits": 8, "group_size": 32}')
    found = config.freeze().quantization
    assert found is not None
    assert (found.method, found.bits, found.group_size) == ("gptq", 8, 32)


def test_code_in_the_folder_is_never_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    assert Config(make_folder(tmp_path, auto_map=auto_map)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("method", ["exl2", "gptq"])
def test_packed_models_compute_in_half_precision_on_a_gpu(tmp_path: Path, method: str) -> None:
    assert Config(make_folder(tmp_path, torch_dtype="bfloat16")).freeze().stored_dtype == "bfloat16"
    told = {"quant_method": method, "bits": 4, "group_size": 128}
    packed = Config(make_folder(tmp_path, torch_dtype="bfloat16", quantization_config=told))
    assert packed.freeze().stored_dtype is None


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [2**22, 10**9, 2**63, 10**400])
def test_an_id_beyond_any_vocabulary_is_refused(tmp_path: Path, key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf'config\.json: "{key}" must be below 4,194,304, found \d+'):
        Config(tiny.make(tmp_path, **{key: [3, value]}))
    with pytest.raises(ConfigError, match=r'generation_config\.json: "eos_token_id" must be below'):
        Config(make_folder(tmp_path, {"eos_token_id": value}))


@pytest.mark.parametrize("key", ["hidden_act", "hidden_size", "rope_scaling", "architectures", "eos_token_id"])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_values_nested_as_deep_as_json_goes_are_refused_in_few_words(tmp_path: Path, key: str, pair: str) -> None:
    opener = '{"a":' if pair == "{}" else "["
    longest = 0
    limit, told = sys.getrecursionlimit(), json.dumps({**LLAMA, key: "@"})
    for depth in range(limit - 250, limit):
        deep = opener * depth + "1" + pair[1] * depth
        (tmp_path / "config.json").write_text(told.replace('"@"', deep))
        try:
            Config(tmp_path)
        except ConfigError as error:
            longest = max(longest, len(str(error)))
    assert longest < len(str(tmp_path)) + 400


HALF = "\ud800"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": [HALF]}, r"architecture '\\ud800' is not supported"),
        ({"architectures": HALF}, r"exactly one name, found '\\ud800'"),
        ({"hidden_act": HALF}, r"found '\\ud800'"),
        ({"rope_scaling": {"type": HALF, "factor": 2.0}}, r"found '\\ud800'"),
        ({"quantization_config": {"quant_method": HALF}}, r"expected gptq or awq, found \\ud800"),
        ({"quantization_config": {"quant_method": "gptq", "checkpoint_format": HALF}}, r"found \\ud800"),
        ({"quantization_config": {"quant_method": "gptq", "pack_dtype": HALF}}, r"words of \\ud800"),
        ({"quantization_config": {"quant_method": "gptq", "bits": HALF}}, r"found '\\ud800'"),
    ],
)
def test_half_a_character_is_escaped_in_messages(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    make_folder(tmp_path, **changes)
    with pytest.raises(ExlmError, match=match) as raised:
        Config(tmp_path).freeze()
    str(raised.value).encode()


def test_half_a_character_in_the_index_is_ignored(tmp_path: Path) -> None:
    tiny.make(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {HALF: HALF, "lm_head.weight": HALF + ".safetensors"}}))
    Model(Config(tmp_path)).load()
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": f"../{HALF}"}}))
    with pytest.raises(ExlmError, match=r"'\.\./\\ud800', outside the folder") as raised:
        Model(Config(tmp_path)).load()
    str(raised.value).encode()
