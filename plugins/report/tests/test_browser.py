"""The report in a browser: curves are drawn and zoomed, samples are found, and a run's texts never act as markup or script."""

from __future__ import annotations

import json

from dovetail.telemetry.jsonl import append_rows

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'><!--\u2028\u2029\ud800 ${window.evil = 1} `\\"


def rows(step, count=4, **changes):
    return [
        {
            "sample_id": f"train.e0.p{number // 2}.a0.s{number % 2}",
            "prompt": f"prompt {step}.{number // 2}",
            "response": f"response {step}.{number}",
            "score": number / 4,
            "response_length": 10 + number,
            "finish_reason": "length" if number == 3 else "stop",
            "components": {"form": 0.5},
            **changes,
        }
        for number in range(count)
    ]


def kept(step):
    row = rows(step)[3] | {"kept": ["best", "longest"], "advantage": 1.25, "trained": True}
    tokens = {"text": ["re", "sponse"], "log_probs": [-0.1, -2.0], "old_log_probs": [-0.5, -1.0]}
    return row | {"tokens": tokens}


def test_every_curve_is_drawn_and_zooming_one_zooms_all(finished, look):
    seen = json.loads(
        look(
            finished,
            """
            const texts = () => [...document.querySelectorAll(".plot svg")].map((svg) => [...svg.querySelectorAll("text")].map((t) => t.textContent).join(" "));
            const before = texts();
            const figure = document.querySelector("[data-chart]");
            figure.dispatchEvent(new KeyboardEvent("keydown", { key: "+", bubbles: true }));
            const zoomed = texts(), button = document.getElementById("unzoom"), label = button.textContent;
            button.click();
            return JSON.stringify({ cards: document.querySelectorAll("[data-chart]").length, before, zoomed, label, after: texts(), hidden: button.hidden });
            """,
        )
    )
    assert len(seen["before"]) == seen["cards"] > 5
    assert all(seen["before"])
    assert seen["label"].startswith("Steps 2 to 4")
    assert all(a != b for a, b in zip(seen["before"], seen["zoomed"], strict=True))
    assert (seen["after"], seen["hidden"]) == (seen["before"], True)


def test_a_step_far_outside_the_others_does_not_flatten_the_curve(run, look):
    values = [0.5 + step % 3 for step in range(60)]
    values[30] = 1e30
    append_rows(run.metrics, [{"step": s, "actor/grad_norm": v} for s, v in enumerate(values)])
    plot = look(run, 'return document.querySelector(".plot").textContent')
    assert plot.startswith("123")
    assert "up to 1e30 above the axis" in plot


def test_responses_to_a_prompt_stand_side_by_side_with_why_they_were_kept(run, look):
    run.write_samples(1, rows(1))
    run.write_samples(1, [kept(1)], name="kept")
    detail = """await pause(() => browser.querySelector(".sample"));"""
    seen = look(
        run,
        detail
        + """
        [...browser.querySelectorAll("[data-filter]")].find((chip) => chip.dataset.filter === "best").click();
        await pause(() => browser.querySelector(".current .rule"));
        return browser.querySelector(".detail").innerText + [...browser.querySelectorAll(".token")].map((t) => "|" + t.title + "|" + t.style.background).join("");
        """,
    )
    for expected in ("response 1.2", "score 0.5", "score 0.75", "advantage 1.25", "best", "longest", "cut at the length limit", "form", "old_log_probs -0.5", "color-mix"):  # fmt: skip
        assert expected in seen, expected


def test_keys_walk_filter_and_search(run, look):
    for step in (1, 2, 3):
        run.write_samples(step, rows(step))
    script = """
    const now = () => browser.querySelector(".count").textContent + " " + browser.querySelector(".sample.current").dataset.id;
    await pause(() => browser.querySelector(".sample.current"));
    const found = [now()];
    press("j"); await pause(() => now() !== found[0]); found.push(now());
    press("k"); await pause(() => now() !== found[1]); found.push(now());
    press("f"); await pause(() => browser.querySelector(".count").textContent.includes("of 3")); found.push(browser.querySelector("[aria-pressed=true]").dataset.filter);
    press("f"); press("/"); found.push(document.activeElement.className);
    const search = browser.querySelector(".search"); search.value = "Response 2.1"; search.dispatchEvent(new Event("input"));
    await pause(() => /^1 of 1$/.test(browser.querySelector(".count").textContent)); found.push(browser.querySelector(".sample.current .response").textContent);
    return JSON.stringify(found);
    """
    first, second, third, pressed, focused, hit = json.loads(look(run, script))
    assert first == third
    assert first.startswith("1 of 12")
    assert second.startswith("2 of 12")
    assert (pressed, focused, hit) == ("cut", "search", "response 2.1")


def test_what_a_policy_a_tool_or_a_user_wrote_stays_text(run, look):
    turn = {"start": 0, "stop": 1, "text": EVIL, "finish_reason": "stop", "sequence": 0, "reward": 0.0, "calls": [{"id": EVIL, "type": "function", "function": {"name": EVIL, "arguments": {EVIL: EVIL}}}], "observed": [{"role": EVIL, "name": EVIL, "content": EVIL}]}  # fmt: skip
    evil = {
        "prompt": [{"role": EVIL, "content": EVIL}, {"role": "user", "content": EVIL}],
        "ground_truth": EVIL,
        "components": {EVIL: 1.0},
        "finish_reason": EVIL,
        "trajectory": {"turns": [turn], "end": "done", "seconds": 1.0, "counts": {EVIL: 1.0}},
        "tokens": {"text": [EVIL, EVIL], "mask": [1, 0], "log_probs": [-1.0, None]},
    }
    run.write_samples(1, [*rows(1, 2, **evil), *rows(1, 1, failure={"kind": EVIL, "message": EVIL})])  # fmt: skip
    append_rows(run.metrics, [{"step": s, "reward/mean": 1.0, f"reward/components/{EVIL}": 0.5, f"val/{EVIL}/mean@1": 0.5, "val/b/mean@1": 0.5} for s in (1, 2)])  # fmt: skip
    append_rows(run.events, [{"level": "error", "event": "setting changed", "step": 1, "detail": EVIL}])  # fmt: skip
    run.write_text("config.yaml", f"a: {EVIL}\n")
    seen = look(
        run,
        """
        const texts = [];
        for (let n = 0; n < 3; n++) {
          await pause(() => browser.querySelector(".sample.current"));
          texts.push(browser.querySelector(".detail").textContent);
          for (const svg of document.querySelectorAll(".plot svg")) svg.dispatchEvent(new PointerEvent("pointermove", { clientX: 200, bubbles: true }));
          const before = browser.querySelector(".sample.current");
          press("j"); await pause(() => browser.querySelector(".sample.current") !== before);
        }
        texts.push([...document.querySelectorAll(".tip")].map((tip) => tip.textContent).join(""));
        return JSON.stringify({ evil: window.evil ?? null, images: document.images.length, text: texts.join("") });
        """,
    )
    found = json.loads(seen)
    assert (found["evil"], found["images"]) == (None, 0)
    shown = EVIL.replace("\ud800", "\ufffd")
    assert found["text"].replace("\ud800", "\ufffd").count(shown) > 12


def test_a_page_without_its_folder_shows_the_first_and_the_last_step(run, look):
    for step in (1, 2, 3):
        run.write_samples(step, rows(step))
    script = """
    await pause(() => browser.querySelector(".sample"));
    return browser.querySelector(".missing").hidden + " " + browser.querySelector(".count").textContent + browser.querySelector(".response").textContent;
    """
    assert look(run, script).startswith("true 1 of 12")
    assert look(run, script, alone=True).startswith("false 1 of 8response 3.0")
