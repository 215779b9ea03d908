"""Whether a run folder can be written is known before the run; the check leaves nothing behind."""

from __future__ import annotations

import pytest

from rlcore.run_log import check_run_folder
from tests.toy_worker import toy_config


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        ("{tmp}/file/run", "cannot be written: .*file: Not a directory"),
        ("{tmp}/file", "cannot be written: .*file: Not a directory"),
        ("{tmp}/dangling", "cannot be written"),
        ("/proc/nope/run", "cannot be written: /proc"),
        ("{tmp}/" + "n" * 300, "cannot be written: .*too long"),
        ("{tmp}/nul\0", "cannot be written: .*null byte"),
        ("", "run_dir is empty"),
    ],
)
def test_a_run_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path, run_dir, message):
    tmp_path.joinpath("file").write_text("in the way")
    tmp_path.joinpath("dangling").symlink_to(tmp_path / "nowhere")
    config = toy_config(run_dir=run_dir.replace("{tmp}", str(tmp_path)))
    with pytest.raises(ValueError, match=message):
        check_run_folder(config, overwrite=True)


def test_the_check_of_the_run_folder_leaves_nothing(tmp_path):
    check_run_folder(toy_config(run_dir=str(tmp_path / "a" / "b")), overwrite=False)
    check_run_folder(toy_config(run_dir=str(tmp_path)), overwrite=False)
    assert list(tmp_path.iterdir()) == []
