"use strict";

// What is embedded in the page, read once. Columns stay columns (typed arrays), one number a step; a thing that can
// happen is an object, and there are few of them. diagrams/explorer/trace.py writes what is read here.

const ABSENT = -1;

class Subject {
  constructor(name) {
    this.name = name;
    this.isRequest = false;
    this.steps = [];
    this.kinds = new Set();
    this.refused = 0;
    this.failed = 0;
  }
}

class Trace {
  constructor(plain) {
    this.name = plain.name;
    this.facts = plain.facts;
    this.notes = plain.notes;
    this.kinds = plain.kinds.map(readKind);
    this.acts = plain.acts;
    this.actTimes = plain.actTimes;
    this.words = plain.words;
    this.calls = plain.calls;
    this.kindOf = Int32Array.from(plain.steps.kind);
    this.subjectOf = Int32Array.from(plain.steps.subject);
    this.actsOf = Int32Array.from(plain.steps.acts);
    this.slotsOf = Int32Array.from(plain.steps.slots);
    this.count = this.kindOf.length;
    this.callOf = new Int32Array(this.count);
    this.firstOf = new Int32Array(plain.calls.steps.length);
    let step = 0;
    plain.calls.steps.forEach((steps, call) => {
      this.firstOf[call] = step;
      this.callOf.fill(call, step, step + steps);
      step += steps;
    });
    this.subjects = this.readSubjects();
    this.fired = countRows(this);
  }

  // Everything, then the coordinator, then the requests in the order in which they first appear.
  readSubjects() {
    const all = new Subject(null);
    const bySubject = new Map();
    for (let step = 0; step < this.count; step++) {
      const word = this.subjectOf[step];
      let subject = bySubject.get(word);
      if (subject === undefined) bySubject.set(word, (subject = new Subject(this.words[word])));
      const kind = this.kindOf[step];
      for (const one of [all, subject]) {
        one.steps.push(step);
        one.kinds.add(kind);
        if (this.kinds[kind].trouble) one[this.kinds[kind].trouble]++;
      }
    }
    const named = [...bySubject.values()];
    for (const subject of named) subject.isRequest = this.kinds[this.kindOf[subject.steps[0]]].machine === "request";
    const subjects = [all, ...named.filter((one) => !one.isRequest), ...named.filter((one) => one.isRequest)];
    for (const subject of subjects) subject.steps = Int32Array.from(subject.steps);
    return subjects;
  }

  // The subject of a step, as an index.
  subjectWith(step) {
    const name = this.words[this.subjectOf[step]];
    return this.subjects.findIndex((subject) => subject.name === name);
  }

  step(step) {
    const call = this.callOf[step];
    return {
      number: step + 1,
      kind: this.kinds[this.kindOf[step]],
      subject: this.words[this.subjectOf[step]],
      slots: this.words[this.slotsOf[step]],
      acts: this.acts[this.actsOf[step]].map(([verb, digest, slot, failed, nth], index) => ({
        verb, digest, slot, failed, nth, took: (this.actTimes[step] || [])[index] ?? ABSENT,
      })),
      call: call,
    };
  }

  call(call) {
    const word = (column) => this.calls[column][call] === ABSENT ? null : this.words[this.calls[column][call]];
    return {
      number: call + 1,
      name: word("name"),
      request: word("request"),
      arguments: word("arguments"),
      result: word("result"),
      began: this.calls.began[call],
      took: this.calls.took[call],
      first: this.firstOf[call],
      steps: this.calls.steps[call],
    };
  }

  // Where a machine stood after a step: of the subject of that step, or of the call's request, or the only one it has.
  // Before its first step that is the initial state. null: there is none, or the machine has no steps of its own.
  stateAt(machine, step) {
    const own = this.kinds[this.kindOf[step]];
    const subject = own.machine === machine ? this.subjectOf[step] : ABSENT;
    const request = this.calls.request[this.callOf[step]];
    for (let at = step; at >= 0; at--) {
      const kind = this.kinds[this.kindOf[at]];
      if (kind.machine !== machine) continue;
      const whose = this.subjectOf[at];
      if (machine !== "request" || whose === (subject === ABSENT ? request : subject)) return kind.target;
    }
    const {initial, follows} = machineOf.get(machine);
    return follows || (machine === "request" && request === ABSENT) ? null : initial;
  }
}

function readKind([machine, row, event, source, target, guards, outcome, failed, ended, ran]) {
  const trouble = outcome === "refused" ? "refused" : outcome === "done" ? "" : "failed";
  const said = [machine, event, source, target, outcome, failed || "", ...ran].join(" ").toLowerCase();
  return {machine, row, event, source, target, guards, outcome, failed, ended, ran, trouble, said};
}

// How often each row fired and each state was entered: "machine row" and "machine state" -> count.
function countRows(trace) {
  const perKind = new Int32Array(trace.kinds.length);
  for (const kind of trace.kindOf) perKind[kind]++;
  const counts = {rows: new Map(), states: new Map()};
  trace.kinds.forEach((kind, index) => {
    const add = (map, key) => map.set(key, (map.get(key) || 0) + perKind[index]);
    add(counts.rows, `${kind.machine} ${kind.row}`);
    if (kind.target !== kind.source) add(counts.states, `${kind.machine} ${kind.target}`);
  });
  return counts;
}

function duration(microseconds) {
  if (microseconds < 0) return "";
  if (microseconds < 1000) return `${microseconds.toFixed(microseconds < 10 ? 1 : 0)} \u00b5s`;
  if (microseconds < 1e6) return `${(microseconds / 1e3).toPrecision(3)} ms`;
  return `${(microseconds / 1e6).toFixed(microseconds < 1e7 ? 2 : 1)} s`;
}

const grouped = new Intl.NumberFormat("en").format;

function plural(count, one, many = `${one}s`) {
  return `${grouped(count)} ${count === 1 ? one : many}`;
}

const data = JSON.parse(document.getElementById("explorer-data").textContent);
const machines = data.machines;
const machineOf = new Map(machines.map((machine) => [machine.name, machine]));
for (const machine of machines) machine.stateOf = new Map(machine.states.map((state) => [state.name, state]));
const trace = data.trace && new Trace(data.trace);
const stepped = trace !== null && trace.count > 0; // without a step there is nothing to go through
const byId = (id) => document.getElementById(id);

// An element with text; whatever a trace says becomes a text node and never markup.
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "click") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}
