"""The settings that a run keeps in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuningfork.config import RunConfig, from_yaml, to_yaml
from tuningfork.errors import RunFolderError
from tuningfork.train.folder import CONFIG, read_config, with_checksum

SETTINGS = with_checksum(to_yaml(RunConfig()))


def test_settings_with_a_checksum_are_the_same_settings(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    (tmp_path / CONFIG).write_text(SETTINGS)
    assert from_yaml(read_config(tmp_path) or "", CONFIG) == RunConfig()


def test_settings_that_were_spoilt_are_refused(tmp_path: Path) -> None:
    """Another learning rate is a learning rate, and a part of the settings is a recipe."""
    wholes = SETTINGS.encode()
    spoilt = [SETTINGS.replace("5.0e-07", "7.0e-07"), SETTINGS[: len(SETTINGS) // 2], SETTINGS + "\n", SETTINGS[:-1]]
    assert SETTINGS not in spoilt
    contents = [text.encode() for text in spoilt]
    for place in range(SETTINGS.index("checksum ") + 9, len(wholes), 7):
        contents.append(wholes[:place] + bytes([wholes[place] ^ 1]) + wholes[place + 1 :])
    for content in contents:
        (tmp_path / CONFIG).write_bytes(content)
        with pytest.raises(RunFolderError, match=r"config\.yaml is not as the run wrote it.* remove its first line"):
            read_config(tmp_path)


def test_what_was_changed_on_purpose_is_read_without_its_checksum(tmp_path: Path) -> None:
    text = SETTINGS.partition("\n")[2].replace("2048", "4096")
    (tmp_path / CONFIG).write_text(text)
    assert from_yaml(read_config(tmp_path) or "", CONFIG).data.max_length == 4096
