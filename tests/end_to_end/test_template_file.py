"""`data.template` as a file: its template is printed in place of the tokenizer's, and is no part of the export."""

from __future__ import annotations

import json

from tests.end_to_end.workbench import CHATML, Job


def test_a_template_file_is_printed_in_place_of_the_tokenizers_own(job: Job) -> None:
    same, other = job.folder / "same.jinja", job.folder / "other.jinja"
    same.write_text(CHATML)
    other.write_text(
        CHATML.replace("'<|im_start|>' + message['role'] + '\n'", "'<|im_start|>as ' + message['role'] + ': '")
    )
    tokens = {}
    for name, template in {"own": "chat", "same": same, "other": other}.items():
        job.but({"data.template": template}).done("data")
        report = json.loads((job.run / "data" / "data_report.json").read_text())
        tokens[name] = report["cost"]["tokens"]
        shown = "".join(piece["text"] for piece in report["shown"][0]["prompt"]["head"])
        assert ("as user: " in shown) == (name == "other")
    assert tokens["own"] == tokens["same"] < tokens["other"]
    trained = job.but({"data.template": other, "train.max_steps": 2})
    outcome = trained.done()
    assert f"chat template: {other}; it is no part of the exported model" in outcome.out
    assert f"! the exported model has its old chat template: copy {other} over it" in outcome.out.splitlines()[-1]
    assert sum(line["tokens"] for line in job.metrics()) > 0
    assert "as '" not in (job.run / "model" / "chat_template.jinja").read_text()
    other.unlink()
    assert f"data.template {other}: there is no such file" in trained.refused("train", "--resume")
