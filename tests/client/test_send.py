import csv

import pytest
from PIL import Image

from safer_tta.client import Client, ServiceError, send_folder
from safer_tta.errors import InvalidValueError
from tests.client.conftest import TOKEN, parts, png, random_images, refuse


@pytest.fixture
def folder(tmp_path):
    """Five images of two classes in three kinds of files, and files that are not images."""
    root = tmp_path / "photos"
    names = ["dog/b.png", "dog/a.JPG", "cat/2.webp", "cat/1.png", "cat/more/cat/3.jpeg"]
    for name, image in zip(names, random_images(5), strict=True):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, "PNG")
    (root / "notes.txt").write_text("no image")
    (root / "cat" / "._1.png").write_bytes(b"what a Mac leaves beside an image")
    return root


SORTED = ["cat/1.png", "cat/2.webp", "cat/more/cat/3.jpeg", "dog/a.JPG", "dog/b.png"]


def test_a_folder_is_sent_whole_and_in_order(service, client, folder):
    ticks = []
    result = send_folder(client, folder, "new", batch=2, tick=lambda done, total: ticks.append((done, total)))
    answered = {"cat": 3, "dog": 2}
    assert result == {"images": 5, "batches": 3, "answered": answered, "accuracy": None, "abstained": 3}
    assert ticks == [(2, 5), (4, 5), (5, 5)]
    sent = [content for request in service.asked("POST", "/batches") for _, content in parts(request)]
    assert sent == [(folder / name).read_bytes() for name in SORTED]
    assert not service.labels
    assert len(service.asked("POST", "/streams")) == 1
    send_folder(client, folder, "gate-7")
    assert len(service.asked("POST", "/streams")) == 1  # it was there


def test_labels_are_the_names_of_folders(service, client, folder, monkeypatch):
    result = send_folder(client, folder, "gate-7", batch=2, labelled=True)
    true = {(folder / name).read_bytes(): int(name.startswith("dog")) for name in SORTED}
    sent = [[true[content] for _, content in parts(request)] for request in service.asked("POST", "/batches")]
    assert [service.labels[number] for number in range(3)] == sent
    assert [0, 1] in sent or [1, 0] in sent  # mixed; in the order of names, one class would follow the other
    answered = [[0, 1], [0, 1], [0]]  # by the server, whatever it is sent
    right = sum(a == b for one, other in zip(answered, sent, strict=True) for a, b in zip(one, other, strict=True))
    assert result["accuracy"] == 20.0 * right
    service.classes = [7, 8]
    (folder / "dog").rename(folder / "7")
    (folder / "cat" / "more" / "cat").rename(folder / "8")
    (folder / "cat").rename(folder.parent / "aside")
    send_folder(client, folder, "numbers", labelled=True)
    assert sorted(service.labels[0]) == [0, 0, 1]
    monkeypatch.chdir(folder / "8")  # of images in the folder itself, its own name
    send_folder(client, ".", "here", labelled=True)
    assert service.labels[0] == [1]


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("suspicion", [None, 0.25])
def test_the_answer_to_each_image_is_a_line_of_a_file(service, client, folder, tmp_path, suspicion):
    service.suspicion = suspicion
    (folder / "dog" / "b.png").rename(folder / "dog" / 'ß, "b".png')
    send_folder(client, folder, "gate-7", batch=2, out=tmp_path / "answers.csv")
    lines = read_csv(tmp_path / "answers.csv")
    assert [line["file"] for line in lines] == [*SORTED[:-1], 'dog/ß, "b".png']
    assert [line["batch"] for line in lines] == ["0", "0", "1", "1", "2"]
    assert [line["class"] for line in lines] == ["cat", "dog", "cat", "dog", "cat"]  # as the server answers
    assert [line["abstain"] for line in lines] == ["1", "0", "1", "0", "1"]
    assert {line["probability"] for line in lines} == {"1.0"}
    assert {line["suspicion"] for line in lines} == {"" if suspicion is None else "0.25"}
    assert {line["true_class"] for line in lines} == {""}


def test_lines_of_labelled_images_have_the_true_class(client, folder, tmp_path):
    sent = send_folder(client, folder, "gate-7", batch=2, labelled=True, out=tmp_path / "answers.csv")
    lines = read_csv(tmp_path / "answers.csv")
    assert sorted(line["file"] for line in lines) == SORTED
    assert all(line["true_class"] == line["file"].split("/")[-2] for line in lines)
    assert sum(line["true_class"] == line["class"] for line in lines) == sent["accuracy"] * 5 / 100


def test_a_file_of_answers_is_complete_or_absent_and_checked_first(service, client, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        send_folder(client, folder, "fresh", out=tmp_path / "nowhere" / "answers.csv")
    assert not service.requests
    service.faults = [None, None, refuse(422, "image 1 cannot be decoded")]
    with pytest.raises(ServiceError):
        send_folder(client, folder, "gate-7", batch=2, out=tmp_path / "answers.csv")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    send_folder(client, folder, "gate-7", batch=2, out=tmp_path / "answers.csv")
    assert len(read_csv(tmp_path / "answers.csv")) == 5


@pytest.mark.parametrize("how", ["killed", "lost"])
def test_a_folder_sent_again_is_applied_once(service, client, folder, how):
    def stop(done, total):
        if how == "killed" and done == 4:
            raise KeyboardInterrupt

    impatient = Client(service.url, TOKEN, retries=0)
    if how == "lost":  # look for the stream, first batch, and the second's answer is lost
        service.faults = [None, None, "lose"]
    with impatient, pytest.raises((KeyboardInterrupt, ServiceError)):
        send_folder(impatient, folder, "gate-7", batch=2, tick=stop)
    assert service.streams["gate-7"]["batches"] == 2
    before = [r.key for r in service.asked("POST", "/batches")]
    service.requests.clear()
    assert send_folder(client, folder, "gate-7", batch=2)["batches"] == 3
    keys = [r.key for r in service.asked("POST", "/batches")]
    assert service.streams["gate-7"]["batches"] == 3
    assert keys[:2] == before
    assert len(set(keys)) == 3


def test_keys_follow_the_stream_the_names_and_the_contents(service, client, folder):
    def keys(stream="gate-7", at=folder):
        service.requests.clear()
        send_folder(client, at, stream, batch=4)
        return [r.key for r in service.asked("POST", "/batches")]

    first = keys()
    assert keys(at=folder.rename(folder.parent / "moved")) == first  # where the folder lies does not matter
    folder = folder.parent / "moved"
    assert not set(keys("other", folder)) & set(first)
    (folder / "dog" / "b.png").write_bytes(png(random_images(1, seed=9)[0]))
    second = keys(at=folder)
    assert second[0] == first[0]
    assert second[1] != first[1]
    (folder / "dog" / "b.png").rename(folder / "dog" / "c.png")
    assert keys(at=folder)[1] not in {first[1], second[1]}


def test_unusable_folders_are_refused(service, client, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidValueError, match=r"no images.*\.jpeg, \.jpg, \.png, \.webp"):
        send_folder(client, tmp_path / "empty", "gate-7")
    with pytest.raises(InvalidValueError, match="not a folder"):
        send_folder(client, tmp_path / "nowhere", "gate-7")
    with pytest.raises(InvalidValueError, match="batch is 0"):
        send_folder(client, folder, "gate-7", batch=0)
    (folder / "dog").rename(folder / "wolf")
    with pytest.raises(InvalidValueError, match=r"wolf .*cat, dog, horse"):
        send_folder(client, folder, "fresh", labelled=True)
    assert list(service.streams) == ["gate-7"]  # nothing was made or sent
    assert not service.asked("POST", "/batches")


def test_a_refused_batch_is_named_and_only_a_missing_stream_is_created(service, client, folder):
    service.faults = [None, None, refuse(422, "image 1 cannot be decoded")]
    with pytest.raises(ServiceError, match=r"image 1 cannot be decoded. Image 0 of this batch is .*3\.jpeg") as caught:
        send_folder(client, folder, "gate-7", batch=2)
    assert caught.value.status == 422
    service.faults = [refuse(403, "this token may not read")]
    with pytest.raises(ServiceError, match="may not read"):
        send_folder(client, folder, "fresh")
    assert not service.asked("POST", "/streams")
