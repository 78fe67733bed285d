"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (id) => document.getElementById(id);

  // The table of contents is folded if it would fill the screen.
  const toc = document.querySelector(".toc");
  if (toc) toc.open = matchMedia("(min-width: 80rem)").matches;

  // A link to folded content unfolds it.
  function reveal() {
    let target = null;
    try { target = one(decodeURIComponent(location.hash.slice(1))); } catch { /* a malformed name, such as #% */ }
    if (!target) return;
    const folded = target.closest("details") ?? target.parentElement.querySelector(":scope > h2 + details");
    if (folded && target.matches("#records, #appendix, #verdicts, details *")) folded.open = true;
    target.scrollIntoView();
  }
  addEventListener("hashchange", reveal);
  addEventListener("click", (event) => { // a second click on the same link does not change the hash
    if (event.target.closest?.("a")?.getAttribute("href") === location.hash) reveal();
  });
  if (location.hash) reveal();

  // A scroll box takes keyboard focus only while its content overflows.
  const watch = new ResizeObserver((entries) => entries.forEach(({ target: box }) => {
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0;
      if (box.tagName === "math") return; // screen readers read it themselves
      box.setAttribute("role", "group");
      let kind = "table";
      if (box.tagName === "PRE") kind = "text";
      if (box.matches(".picture")) kind = "picture";
      box.setAttribute("aria-label", `Scrolls: ${box.querySelector("caption")?.textContent ?? kind}`);
    } else {
      ["tabindex", "role", "aria-label"].forEach((name) => box.removeAttribute(name));
    }
  }));
  all(".scroll, pre, math[display=block]").forEach((box) => watch.observe(box));

  // The reader's choice of visible code, kept for all pages. Browsers may forbid storage.
  const code = one("code");
  if (code) {
    const choice = code.querySelector("select");
    const show = () => {
      document.body.classList.toggle("no-code", choice.value === "none");
      all("details.code").forEach((fold) => (fold.open = choice.value === "all"));
    };
    try { choice.value = localStorage.getItem("asrkit-code") ?? "key"; } catch { /* not allowed */ }
    if (!choice.value) choice.value = "key";
    choice.addEventListener("change", () => {
      show();
      try { localStorage.setItem("asrkit-code", choice.value); } catch { /* not allowed */ }
    });
    show();
    code.hidden = false;
  }

  // A slider over pictures drawn during the run.
  all(".frames").forEach((box, number) => {
    const frames = all(".frame", box);
    const [label, range, said] = ["label", "input", "output"].map((tag) => document.createElement(tag));
    range.id = `frames-${number}`;
    Object.assign(range, { type: "range", min: 0, max: frames.length - 1, step: 1 });
    range.value = frames.findIndex((frame) => !frame.hidden);
    label.htmlFor = range.id;
    label.textContent = box.dataset.label;
    const move = () => {
      frames.forEach((frame, at) => (frame.hidden = at !== Number(range.value)));
      said.textContent = frames[range.value].dataset.name;
      range.setAttribute("aria-valuetext", said.textContent);
    };
    range.addEventListener("input", move);
    const control = document.createElement("div");
    control.className = "control";
    control.append(label, range, said);
    box.prepend(control);
    move();
  });

  // Print everything unfolded.
  let closed = [];
  addEventListener("beforeprint", () => { closed = all("details:not([open])"); closed.forEach((fold) => (fold.open = true)); });
  addEventListener("afterprint", () => closed.forEach((fold) => (fold.open = false)));
})();
