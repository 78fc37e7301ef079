// Lists of any length with as many elements as fit on the screen.

const SPARE = 6; // rows that are kept above and below those in sight

class LongList {
  // row: (element, index) fills a row; chosen: told of the index that the reader chose.
  constructor(box, height, row, chosen) {
    Object.assign(this, {box, height, row, chosen, count: 0, current: ABSENT, rows: new Map(), spare: []});
    this.inside = el("div", {class: "inside", role: "presentation"});
    box.append(this.inside);
    box.style.setProperty("--row", `${height}px`);
    box.addEventListener("scroll", () => this.soon(), {passive: true});
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("focus", () => this.draw());
    box.addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) this.chosen(Number(row.dataset.index));
    });
    new ResizeObserver(() => this.soon()).observe(box);
  }

  fill(count) {
    this.count = count;
    this.inside.style.height = `${count * this.height}px`;
    for (const index of [...this.rows.keys()]) this.drop(index);
    this.draw();
  }

  choose(index) {
    this.current = index;
    if (index !== ABSENT) {
      const top = index * this.height, {scrollTop, clientHeight} = this.box;
      if (top < scrollTop || top + this.height > scrollTop + clientHeight) {
        // One further is brought in at the edge, anything else in the middle, where its neighbours can be read too.
        const near = Math.abs(top - scrollTop) < clientHeight + 2 * this.height;
        const edge = top < scrollTop ? top : top + this.height - clientHeight;
        this.box.scrollTop = near ? edge : top - clientHeight / 2;
      }
    }
    this.draw();
  }

  soon() {
    if (!this.waiting) {
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        this.draw();
      });
    }
  }

  draw() {
    const {scrollTop, clientHeight} = this.box;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - SPARE);
    const last = Math.min(this.count - 1, Math.ceil((scrollTop + clientHeight) / this.height) + SPARE);
    // Where nothing is chosen, the keys begin at the first.
    const active = this.current >= 0 && this.current < this.count ? this.current : 0;
    for (const index of [...this.rows.keys()]) {
      if ((index < first || index > last) && index !== active) this.drop(index);
    }
    for (let index = first; index <= last; index++) this.put(index);
    if (active < this.count) this.put(active);
    for (const [index, element] of this.rows) {
      this.mark(element, index === this.current);
      element.classList.toggle("active", index === active);
    }
    if (this.rows.has(active)) this.box.setAttribute("aria-activedescendant", this.rows.get(active).id);
    else this.box.removeAttribute("aria-activedescendant");
  }

  put(index) {
    if (this.rows.has(index)) return;
    const element = this.spare.pop() || el("div", {role: "option"});
    element.id = `${this.box.id}-${index}`;
    element.dataset.index = index;
    element.setAttribute("aria-setsize", this.count);
    element.setAttribute("aria-posinset", index + 1);
    element.style.transform = `translateY(${index * this.height}px)`;
    element.className = "";
    this.row(element, index);
    this.rows.set(index, element);
    this.inside.append(element);
  }

  drop(index) {
    const element = this.rows.get(index);
    this.rows.delete(index);
    element.remove();
    if (this.spare.length < 2 * SPARE) this.spare.push(element);
  }

  mark(element, current) {
    element.setAttribute("aria-selected", current);
    if (current) element.setAttribute("aria-current", "true");
    else element.removeAttribute("aria-current");
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.height) - 1);
    const by = {ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity, Enter: 0, " ": 0}[event.key];
    if (by === undefined || event.altKey || event.ctrlKey || event.metaKey || !this.count) return;
    event.preventDefault();
    event.stopPropagation();
    this.chosen(Math.max(0, Math.min(this.count - 1, this.current + by)));
  }
}

function makeRequestList() {
  let shown = [];
  const list = new LongList(byId("requests"), 30, drawRow, (index) => goToSubject(shown[index]));
  function drawRow(element, index) {
    const subject = trace.subjects[shown[index]];
    const last = trace.kinds[trace.kindOf[subject.steps[subject.steps.length - 1]]];
    element.replaceChildren(
      el("span", {class: subject.name === null ? "name all" : "name"}, subject.name ?? "everything"),
      subject.name === null || last.machine !== "request" ? "" : el("span", {class: "state"}, last.target),
      el("span", {class: "room"}),
      subject.refused ? badge("refused", subject.refused) : "",
      subject.failed ? badge("failed", subject.failed) : "",
      el("span", {class: "number", title: plural(subject.steps.length, "step")}, grouped(subject.steps.length)),
    );
  }
  function mark() {
    list.choose(shown.indexOf(looking.subject));
  }
  function refill() {
    shown = subjectsShown();
    const requests = shown.filter((index) => trace.subjects[index].isRequest).length;
    byId("requests-count").textContent = grouped(requests);
    byId("requests-empty").hidden = shown.some((index) => trace.subjects[index].name !== null);
    list.fill(shown.length);
    mark();
  }
  on("subjects", refill);
  on("steps", mark);
  refill();
  return {
    // What was found gets the focus, and is chosen if it is not already.
    enter: () => {
      if (!shown.length) return;
      if (!shown.includes(looking.subject)) goToSubject(firstRequest(shown));
      byId("requests").focus();
    },
    goBy: (count) => {
      const at = shown.indexOf(looking.subject) + count;
      if (at >= 0 && at < shown.length) goToSubject(shown[at]);
    },
  };
}

function badge(trouble, count) {
  const mark = trouble === "refused" ? "\u2298" : "\u2715";
  return el("span", {class: `badge ${trouble}`, title: `${count} ${trouble}`},
    el("span", {"aria-hidden": "true"}, mark), grouped(count), el("span", {class: "unseen"}, ` ${trouble}`));
}

function makeTimeline() {
  const list = new LongList(byId("timeline"), 40, drawRow, (index) => goToStep(looking.shown[index]));
  function drawRow(element, index) {
    const step = looking.shown[index], kind = trace.kinds[trace.kindOf[step]];
    const mixed = trace.subjects[looking.subject].name === null;
    element.className = kind.trouble;
    element.replaceChildren(
      el("span", {class: "number"}, grouped(step + 1)),
      el("span", {class: "what"},
        el("span", {class: "name"}, kind.event),
        el("span", {class: "way"},
          mixed ? el("span", {class: "subject"}, trace.words[trace.subjectOf[step]]) : "",
          kind.source === kind.target ? kind.target : `${kind.source} \u2192 ${kind.target}`)),
      kind.trouble ? el("span", {class: `badge ${kind.trouble}`}, kind.outcome.replace("_", " ")) : "",
    );
  }
  on("steps", () => {
    const subject = trace.subjects[looking.subject];
    byId("timeline-title").firstChild.textContent = `Steps of ${subject.name ?? "everything"} `;
    const all = subject.steps.length, some = looking.shown.length;
    byId("timeline-count").textContent = some === all ? grouped(all) : `${grouped(some)} of ${grouped(all)}`;
    byId("timeline-empty").hidden = some > 0;
    list.fill(some);
  });
  on("step", () => list.choose(looking.step === ABSENT ? ABSENT : positionOf(looking.step)));
}
