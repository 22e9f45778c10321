import pytest


@pytest.mark.timeout(600)
def test_an_attack_is_noticed_after_it_began_and_not_before(run, tmp_path):
    tiny = ["--targets", "photo", "--rates", "0", "100", "--seeds", "1", "--images", "96", "--steps", "12"]
    clean, attacked = run("alarms", tmp_path / "rows.csv", *tiny)
    assert (clean["clean_images"], clean["late_images"], clean["images_until"]) == ("96", "0", "")
    assert (attacked["clean_images"], attacked["late_images"]) == ("48", "48")
    assert int(attacked["late_flagged"]) > int(attacked["clean_flagged"])
