"""Damage files of states and models in 2,400 ways: each is refused with a typed error, or read as it was written."""

import copy
import json
import random
import struct

import pytest
import torch

from safer_tta import Classifier
from safer_tta._internal import safetensors_io
from safer_tta.errors import InvalidValueError, TensorFileError
from safer_tta.models import load_classifier
from safer_tta.models.zoo import create
from tests.conftest import adapt_small, batches

MUTANTS = 1200  # of each file
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "Q9", None)


def state_file(folder):
    adapted = adapt_small("tent", "safer-g")
    list(adapted.stream(batches(2)))
    adapted.save(folder / "written")
    other = adapt_small("tent", "safer-g")
    return lambda path: other.load(path).state_dict()


def model_file(folder):
    Classifier(create("small", num_classes=3), mean=0.5, std=0.2).save(
        folder / "written", architecture="small", classes=["cat", "cow", "dog"], side=32
    )
    return lambda path: load_classifier(path).model.state_dict()


def split(content):
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header, data):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def flip(rng, content):
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def flip_in_header(rng, content):
    place = 8 + rng.randrange(struct.unpack("<Q", content[:8])[0])
    return content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]


def swap(field):
    def mutate(rng, header):
        one, two = rng.sample([name for name in header if name != "__metadata__"], 2)
        header[one][field], header[two][field] = header[two][field], header[one][field]

    return mutate


def swap_twins(rng, header):
    """Swap two tensors of one shape: all that a reader can check without a hash is as it was."""
    named = [name for name in header if name != "__metadata__"]
    pairs = [(a, b) for a in named for b in named if a < b and header[a]["shape"] == header[b]["shape"]]
    one, two = rng.choice(pairs)
    header[one], header[two] = header[two], header[one]


def overlap(rng, header):
    one, two = rng.sample([name for name in header if name != "__metadata__"], 2)
    header[one] |= {key: header[two][key] for key in ("shape", "data_offsets", "dtype")}


def retype(rng, header):
    name = rng.choice([name for name in header if name != "__metadata__"])
    header[name]["dtype"] = rng.choice(DTYPES)


def reshape(rng, header):
    name = rng.choice([name for name in header if name != "__metadata__"])
    shape = header[name]["shape"]
    header[name]["shape"] = rng.choice([shape[::-1], [*shape, 1], [1] * 5000, [2**62, 4], [-1], [shape], {}, None])


def drop(rng, header):
    del header[rng.choice([name for name in header if name != "__metadata__"])]


def rename(rng, header):
    name = rng.choice([name for name in header if name != "__metadata__"])
    header[rng.choice([name[:-1], name + "_", name.upper(), "__metadata__"])] = header.pop(name)


def describe_otherwise(rng, header):
    key = rng.choice([key for key in header["__metadata__"] if not key.startswith("blake2b")])
    header["__metadata__"][key] = rng.choice(["", "9", 7, None, [], "nan"])


HEADERS = (swap("data_offsets"), swap("shape"), swap_twins, overlap, retype, reshape, drop, rename, describe_otherwise)


def edit(rng, content):
    header, data = split(content)
    before = copy.deepcopy(header)
    while header == before:
        rng.choice(HEADERS)(rng, header)
    return joined(header, data)


def add(rng, content):
    """Add a tensor with its numbers, or name one twice."""
    header, data = split(content)
    name = rng.choice([name for name in header if name != "__metadata__"])
    size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    entry = {**header[name], "data_offsets": [len(data), len(data) + size]}
    if rng.random() < 0.5:
        return joined({**header, f"{name}.more": entry}, data + bytes(size))
    text = json.dumps(header)
    twice = f'{{"{name}": {json.dumps(entry)}, {text[1:]}'
    return joined(twice.encode(), data + bytes(size))


def cut(rng, content):
    return content[: rng.randrange(len(content))]


def extend(rng, content):
    more = rng.randbytes(rng.choice((1, 8, 4096)))
    place = rng.choice((0, 8, len(content) // 2, len(content)))
    return content[:place] + more + content[place:]


def nest(rng, content):
    header, data = split(content)
    depth = rng.choice((10, 1000, 100_000))
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = opened * depth + b"1" + closed * depth
    inside = json.dumps(header).encode()[:-1] + b', "deep": ' + deep + b"}"
    return joined(rng.choice((deep, inside)), data)


def claim(rng, content):
    return struct.pack("<Q", rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(content), 100_000_000))) + content[8:]


MUTATIONS = (flip, flip_in_header, edit, edit, edit, add, cut, extend, nest, claim)


@pytest.mark.parametrize("make", [state_file, model_file])
def test_no_mutant_is_read_as_other_tensors(make, tmp_path):
    load, rng = make(tmp_path), random.Random(7)
    written = (tmp_path / "written").read_bytes()
    expected, loaded = safetensors_io.loads(written)[0], load(tmp_path / "written")
    refused, wrong, path = 0, [], tmp_path / "mutant"
    for number in range(MUTANTS):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        path.write_bytes(mutate(rng, written))
        try:
            same = is_same(safetensors_io.read(path)[0], expected) and is_same(load(path), loaded)
        except InvalidValueError:
            refused += 1
        else:
            wrong += [] if same else [(number, mutate.__name__)]
    assert not wrong
    assert refused > 0.9 * MUTANTS  # the others flip a bit in the name of the header's hash, or in what is not read


def is_same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in expected.items()
    )


def test_a_header_that_names_a_tensor_twice_is_refused():
    entry = '{"dtype":"U8","shape":[8],"data_offsets":[0,8]}'
    with pytest.raises(TensorFileError):
        safetensors_io.loads(joined(f'{{"a":{entry},"a":{entry}}}'.encode(), bytes(8)))


def test_a_huge_header_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "x").write_bytes(joined(b'{"a":[' + b"[]," * 4_000_000 + b"1]}", b""))
    with pytest.raises(TensorFileError, match="header of 12000009 bytes"):
        safetensors_io.read(tmp_path / "x")


def test_a_file_without_a_hash_of_its_header_is_read_and_said_so_once(tmp_path, caplog):
    written, path = safetensors_io.dumps({"a": torch.arange(3.0)}, {"note": "x"}), tmp_path / "old"
    header, data = split(written)
    del header["__metadata__"][safetensors_io.HEADER]
    path.write_bytes(joined(header, data))
    for _ in range(2):
        tensors, metadata = safetensors_io.read(path)
        assert (tensors["a"].tolist(), metadata) == ([0, 1, 2], {"note": "x"})
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("change", ["nan", "missing", "renamed", "integers"])
def test_a_state_that_is_not_whole_is_refused_and_changes_nothing(change, tmp_path):
    adapted = adapt_small("tent", "plain")
    list(adapted.stream(batches(2)))
    adapted.save(tmp_path / "state")
    tensors, header = safetensors_io.read(tmp_path / "state")
    name = next(name for name in tensors if name.endswith("exp_avg_sq"))
    damaged = tensors.pop(name)
    if change == "nan":
        tensors[name] = damaged.fill_(torch.nan)
    elif change == "renamed":
        tensors[name[:-1] + "r"] = damaged
    elif change == "integers":
        tensors[name] = damaged.int()
    safetensors_io.write(tmp_path / "state", tensors, header)
    with pytest.raises(InvalidValueError, match=r"exp_avg_sq"):
        adapted.load(tmp_path / "state")
    adapted(batches(1)[0])  # it goes on as before
