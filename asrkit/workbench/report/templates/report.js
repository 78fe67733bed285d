"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (id) => document.getElementById(id);
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();

  function compare(column, sign) {
    return (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (!x || !y || x === "–" || y === "–") return (!x || x === "–") - (!y || y === "–"); // what is missing comes last
      const [p, q] = [Number(x), Number(y)];
      return sign * (Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y, "en", { numeric: true }) : p - q);
    };
  }

  // Sorting: a column's first press sorts up, the second down, the third restores the order of the page.
  const chosen = new Map(); // table -> [column, direction]
  function press(table, column, direction) {
    const heads = all("thead th", table);
    const now = heads[column]?.getAttribute("aria-sort");
    const next = direction ?? (now === "ascending" ? "descending" : now === "descending" ? "" : "ascending");
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    if (next) heads[column].setAttribute("aria-sort", next);
    if (table.id === "ledger") {
      one("group").value = next ? "" : direction === "" ? one("group").value : "document";
      one("sort").value = next ? `${column} ${next}` : "";
    }
    chosen.set(table, next ? [column, next === "ascending" ? 1 : -1] : null);
    arrange(table);
  }
  const rows = new Map(all("table.sortable").map((table) => [table, all("tbody tr:not(.group)", table)]));
  const bodies = new Map(all("table.sortable").map((table) => [table, [...table.tBodies]]));

  function arrange(table) {
    const sort = chosen.get(table);
    const by = table.id === "ledger" ? one("group").value : "document";
    [...table.tBodies].forEach((body) => body.remove());
    if (sort || !by) {
      const body = table.createTBody();
      const order = sort ? [...rows.get(table)].sort(compare(...sort)) : rows.get(table);
      body.append(...order);
    } else if (by === "notebook") {
      const names = [...new Set(rows.get(table).map((row) => row.dataset.notebook))].sort();
      for (const name of names) {
        const body = table.createTBody();
        const head = body.insertRow();
        head.className = "group";
        const cell = document.createElement("th");
        cell.colSpan = 6;
        cell.scope = "rowgroup";
        cell.append(`${name} `, Object.assign(document.createElement("span"), { className: "soft count" }));
        head.append(cell);
        body.append(...rows.get(table).filter((row) => row.dataset.notebook === name));
      }
    } else {
      const kept = bodies.get(table);
      table.append(...kept);
      const home = (row) => kept.find((body) => body.dataset.group === row.dataset.document) ?? kept[0];
      rows.get(table).forEach((row) => home(row).append(row));
    }
    all("tbody, tbody tr, tbody th", table).forEach((part) => {
      if (table.hasAttribute("role")) part.setAttribute("role", { TBODY: "rowgroup", TR: "row", TH: "rowheader" }[part.tagName]);
    });
    if (table.id === "ledger") filter();
  }

  all("table.sortable").forEach((table) => {
    all("thead th", table).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => press(table, column));
      head.append(button);
    });
  });

  // The ledger's filters.
  const ledger = one("ledger");
  const chips = all(".chip[data-verdict]");
  function filter() {
    const words = one("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const labels = chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.verdict);
    const picks = ["document", "notebook", "needs"].map((key) => [key, one(`by-${key}`).value]).filter(([, wanted]) => wanted);
    let shown = 0;
    for (const row of rows.get(ledger)) {
      const text = row.textContent.toLowerCase();
      row.hidden = !(words.every((word) => text.includes(word)) && (!labels.length || labels.includes(row.dataset.verdict)) &&
        picks.every(([key, wanted]) => row.dataset[key] === wanted));
      shown += !row.hidden;
    }
    for (const body of ledger.tBodies) {
      const inside = all("tr:not(.group)", body);
      const visible = inside.filter((row) => !row.hidden).length;
      body.hidden = !visible;
      const count = body.querySelector(".count");
      if (count) count.textContent = visible === inside.length ? visible : `${visible} of ${inside.length}`;
    }
    one("shown").textContent = `${shown} of ${rows.get(ledger).length} claims shown`;
    one("clear").hidden = shown === rows.get(ledger).length;
  }
  function clear() {
    chips.forEach((chip) => chip.setAttribute("aria-pressed", "false"));
    ["find", "by-document", "by-notebook", "by-needs"].forEach((id) => (one(id).value = ""));
    filter();
  }
  if (ledger) {
    all("thead th", ledger).forEach((head, column) => {
      for (const [direction, said] of [["ascending", "up"], ["descending", "down"]]) {
        one("sort").append(new Option(`${head.textContent}, ${said}`, `${column} ${direction}`));
      }
    });
    one("sort").addEventListener("change", (event) => {
      const [column, direction] = event.target.value.split(" ");
      if (!direction) one("group").value = "document";
      press(ledger, Number(column), direction ?? "");
    });
    chips.forEach((chip) => chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      filter();
    }));
    ["by-document", "by-notebook", "by-needs"].forEach((id) => one(id).addEventListener("change", filter));
    one("find").addEventListener("input", filter);
    one("group").addEventListener("change", () => press(ledger, 0, ""));
    one("clear").addEventListener("click", () => { clear(); one("find").focus(); });
    document.querySelector(".tools").hidden = false;
    filter();
  }

  // Where it would fill the screen it is folded.
  const toc = document.querySelector(".toc");
  if (toc) toc.open = matchMedia("(min-width: 80rem)").matches;

  // A link to something that is filtered away or folded shows it.
  function reveal() {
    let target = null;
    try { target = one(decodeURIComponent(location.hash.slice(1))); } catch { /* no name of anything, as #% */ }
    if (!target) return;
    if (target.hidden) clear();
    const folded = target.closest("details") ?? target.parentElement.querySelector(":scope > h2 + details");
    if (folded && target.matches("#records, #appendix, #verdicts, details *")) folded.open = true;
    target.scrollIntoView();
  }
  addEventListener("hashchange", reveal);
  addEventListener("click", (event) => { // the hash does not change where it is there already
    if (event.target.closest?.("a")?.getAttribute("href") === location.hash) reveal();
  });
  if (location.hash) reveal();

  // A box that scrolls takes the keyboard only while something in it is cut off.
  const watch = new ResizeObserver((entries) => entries.forEach(({ target: box }) => {
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0;
      if (box.tagName === "math") return; // it reads itself
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

  // How much code a reader wants to see, on every page and the next time. A browser may store nothing.
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

  // A slider over pictures that were drawn when the notebook ran.
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

  // Paper has nothing to unfold.
  let closed = [];
  addEventListener("beforeprint", () => { closed = all("details:not([open])"); closed.forEach((fold) => (fold.open = true)); });
  addEventListener("afterprint", () => closed.forEach((fold) => (fold.open = false)));
})();
