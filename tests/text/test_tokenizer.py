"""Tokenizer: ids against transformers, lossless round trips, one beginning-of-sequence id, chat templates."""

import json

import numpy as np
import pytest
import transformers

from tests.models_on_disk import quick_start_files, quick_start_path, small_tokenizer, tiny_spec, write_gguf
from zerogap.errors import ConfigError
from zerogap.text import Tokenizer
from zerogap.weights import open_model, save_folder

TEXTS = [
    "Hello, world! It's 12345 o'clock; don't I'LL WE'RE",
    "\u201ccurly\u201d \u2018quotes\u2019 \u2014 it\u2019s \u2026",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea fam\u00edlia e\u0301 \u00f1 \ufffd",
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587\u3002\u4e2d\u6587",
    "\ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "def f(x):\n\treturn x**2 + 3.14159  # comment\n\n\n",
    "   leading and trailing   ",
    "\r\n \r\n\t",
    "a" * 300 + "\u0000\u0001",
    "3*4=12, 100000000001",
]


@pytest.fixture(scope="module")
def smol():
    files = quick_start_files()
    return Tokenizer.from_files(files.tokenizer_files(), files.chat_template)


@pytest.fixture(scope="module")
def smol_by_transformers():
    path = quick_start_path()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers_own_reading_and_decode_back(smol, smol_by_transformers, text):
    ids = smol.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == smol_by_transformers(text, add_special_tokens=False)["input_ids"]
    assert smol.decode(ids) == text


def test_every_digit_is_a_token_also_after_two_spaces(smol):
    """The original splits digits off first (`Digits`), so the two spaces stay one token. A plain byte-level split, as
    transformers builds it from the file, would take the second one to the digit."""
    pieces = [smol.decode([i]) for i in smol.encode("a  12")]
    assert pieces == ["a", "  ", "1", "2"]


def test_chat_ids_equal_transformers_also_after_saving(smol, smol_by_transformers, tmp_path):
    chats = [
        [{"role": "user", "content": "What is 3*4?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "\U0001f600?"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello \u201cyou\u201d"},
            {"role": "user", "content": "1+1"},
        ],
    ]
    for name, content in quick_start_files().tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for chat in chats:
        for prompt in (True, False):
            ids = smol.encode_chat(chat, add_generation_prompt=prompt).tolist()
            for theirs in (smol_by_transformers, saved):
                assert ids == theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert smol.render_chat(chats[1]).endswith("<|im_start|>assistant\n")
    assert smol.prompt_ids(chats[0]).tolist() == smol.encode_chat(chats[0]).tolist()


def test_a_pair_of_ids_that_is_not_the_canonical_encoding_stays_as_it_is(smol):
    ids = [smol.encode(c)[0] for c in "the"]
    assert smol.encode(smol.decode(ids)).tolist() != [int(i) for i in ids]
    assert smol.prompt_ids(ids).tolist() == [int(i) for i in ids]


BOS_TEMPLATES = {
    "with": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "without": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}


@pytest.fixture(params=[True, False])
def small(request, tmp_path):
    meta = small_tokenizer(add_bos_token=request.param)
    files = open_model(write_gguf(tmp_path / "m.gguf", tiny_spec("llama"), tokenizer=meta))
    folder = save_folder(tmp_path / "saved", files.spec, files.tensors(), files)
    return request.param, files.tokenizer_files(), open_model(folder).tokenizer_files()


@pytest.mark.parametrize("template", BOS_TEMPLATES)
def test_exactly_one_bos_on_text_chat_and_ids(small, template):
    adds_bos, *both = small
    for files in both:
        tokenizer = Tokenizer.from_files(files, BOS_TEMPLATES[template])
        assert tokenizer.bos_token_id == (0 if adds_bos else None)
        plain = [c - 33 + 3 for c in b"h"]
        assert tokenizer.prompt_ids("h").tolist() == ([0] if adds_bos else []) + plain
        assert tokenizer.prompt_ids("<s>h").tolist() == [0, *plain]
        chat = tokenizer.prompt_ids([{"role": "user", "content": "h"}]).tolist()
        assert chat == ([0] if adds_bos or template == "with" else []) + [*plain, 1]
        assert tokenizer.prompt_ids([0, 5]).tolist() == [0, 5]
        if adds_bos:
            assert tokenizer.prompt_ids("<s><s>h").tolist() == [0, *plain]
            with pytest.raises(ConfigError, match="beginning of sequence"):
                tokenizer.prompt_ids([0, 0, 5])


def test_added_tokens_and_merges_of_a_small_file(small):
    _, files, saved = small
    for tokenizer in (Tokenizer.from_files(files), Tokenizer.from_files(saved)):
        ids = tokenizer.encode("he t<|end|><think>").tolist()
        assert ids[-4:] == [259, 260, 2, 261]
        assert tokenizer.decode(ids[-4:]) == "he t<|end|><think>"
        assert tokenizer.decode(ids, skip_special_tokens=True) == "he t<think>"
        assert tokenizer.special_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "is empty"),
        ([], "non-empty list"),
        ([1.5], "non-empty list"),
        ([-1], "from 0 to"),
        ([49152], "from 0 to 49151"),
        ([[1, 2]], "non-empty list"),
        ([{"role": "user"}], "needs a role and a content"),
    ],
)
def test_prompts_that_mean_nothing_are_refused(smol, prompt, message):
    with pytest.raises(ConfigError, match=message):
        smol.prompt_ids(prompt)


def test_a_chat_without_template_or_refused_by_it_is_an_error(smol):
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(smol.backend).encode_chat(chat)
    with pytest.raises(ConfigError, match="roles must alternate"):
        Tokenizer(smol.backend, "{{ raise_exception('roles must alternate') }}").encode_chat(chat)
    with pytest.raises(ConfigError, match="refuses them"):
        Tokenizer(smol.backend, "{% for %}").encode_chat(chat)


def test_a_model_without_tokenizer_is_refused_by_name():
    with pytest.raises(ConfigError, match="no tokenizer files"):
        Tokenizer.from_files({})


def test_spaces_are_never_cleaned_up(smol):
    files = quick_start_files().tokenizer_files()
    config = json.loads(files["tokenizer_config.json"]) | {"clean_up_tokenization_spaces": True}
    tokenizer = Tokenizer.from_files(files | {"tokenizer_config.json": json.dumps(config).encode()})
    text = "a , b . do n't ?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
