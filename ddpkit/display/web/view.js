// Draws a running job as live lanes, from the short messages that `view.py` sends; text of a rank only ever becomes a text
// node. `evidence.js`, which comes below this in the same module, draws what was found when nothing moved.

const STDERR = 1;
const GAP = 2;
const MOST_LINES = { open: 2000, closed: 300 };
const MOST_OPEN_LANES = 4;
const MOST_SAMPLES = 240;
const SILENCE_S = 5;
const UNHEARD_MS = 2500;
const CONSEQUENCE = ": a consequence";
// Nothing that the rank itself did.
const GONE = "was lost with its host";
const ERROR_LINE = /Traceback|\b\w*(Error|Exception)\b|terminate called|Fatal Python error/;
// A row of a table or box, which means nothing when it is wrapped: two of the lines and corners that separate cells (not a
// progress bar's plain strokes), bars at both ends, more bars than a log's prefix has, or a rule.
const TABLE = /([\u2502\u2503\u2506\u2507\u250a-\u254b\u254e\u254f\u2551-\u2570].*){2}|^\s*[|+].*[|+]\s*$|( \| .*){3}|^\s*[-=+_\u2500\u2501\u2550 ]{20,}$/;
const STATES = {
  starting: "starting", queued: "in the queue", running: "running", stopping: "stopping", passed: "passed", failed: "failed",
  hung: "hung", timed_out: "timed out", stopped: "stopped",
};

export default {
  render({ model, el }) {
    const view = new View(model);
    el.append(view.root);
    view.start();
    return () => view.end();
  },
};

// One job: header, lanes, evidence.
class View {
  constructor(model) {
    this.model = model;
    this.id = Math.random().toString(36).slice(2);
    this.lanes = new Map();
    this.lastBatch = 0;
    this.complete = false;
    this.heardAt = this.atWas = performance.now();
    this.at = 0;
    this.build();
  }

  build() {
    this.name = make("span", "ddp-name");
    this.pill = make("span", "ddp-pill");
    this.note = make("span", "ddp-note");
    const state = make("span", "ddp-state", this.pill, this.note);
    state.setAttribute("role", "status");
    this.facts = make("span", "ddp-facts");
    this.elapsed = make("span", "ddp-elapsed");
    this.jump = button("Jump to the first error", () => this.showFirstError());
    this.copy = button("Copy command", () => this.copyCommand(), "Copy the torchrun command of this job");
    this.stop = button("Stop", () => this.askToStop());
    this.stop.classList.add("ddp-stop");
    this.jump.hidden = true;
    const about = make("span", "ddp-about", this.facts, this.elapsed);
    const actions = make("div", "ddp-actions", this.jump, this.copy, this.stop);
    this.chips = make("div", "ddp-chips");
    this.grid = make("div", "ddp-grid");
    this.evidence = new Evidence();
    this.chips.hidden = true;
    this.chips.setAttribute("role", "group");
    this.chips.setAttribute("aria-label", "Ranks; press to open or close a lane");
    const head = make("div", "ddp-head", make("div", "ddp-title", this.name, state, about), actions);
    this.root = make("section", "ddpkit", head, this.chips, this.grid, this.evidence.root);
    // JupyterLab's one-key shortcuts would take Enter and the arrows from the buttons and lanes in here.
    this.root.setAttribute("data-lm-suppress-shortcuts", "true");
  }

  start() {
    this.stopTheme = followTheme(this.root);
    this.stopSize = onNewWidth(this.root, () => this.lanes.forEach((lane) => lane.settle()));
    this.onMessage = (message) => this.receive(message);
    this.onJob = () => this.showJob();
    this.onFinal = () => this.finish();
    this.model.on("msg:custom", this.onMessage);
    this.model.on("change:job", this.onJob);
    this.model.on("change:final", this.onFinal);
    this.showJob();
    if (this.isOver) return this.finish();
    this.ticker = setInterval(() => this.tick(), 100);
    this.say({ kind: "hello", view: this.id });
  }

  end() {
    clearInterval(this.ticker);
    this.stopTheme();
    this.stopSize();
    this.model.off("msg:custom", this.onMessage);
    this.model.off("change:job", this.onJob);
    this.model.off("change:final", this.onFinal);
  }

  get isOver() {
    return Boolean(this.model.get("final")?.over);
  }

  showJob() {
    const job = this.model.get("job") ?? {};
    this.name.textContent = job.name ?? "no job yet";
    this.facts.textContent = job.facts ?? "";
    this.root.setAttribute("aria-label", `live view of ${job.name ?? "no job yet"}`);
    this.copy.hidden = !job.command;
    this.stop.hidden = this.isOver || !job.name;
    this.stop.title = job.hears
      ? "End every rank of this job"
      : "This kernel may hear it only when the cell has ended; its own interrupt (■ in the toolbar) stops the job at once";
    for (let rank = 0; rank < (job.nproc ?? 0); rank++) this.lane(rank);
    if (!this.pill.textContent) this.showState({ state: "starting" });
    this.arrange();
  }

  // Messages.

  say(message) {
    try {
      this.model.send(message);
    } catch {
      this.note.textContent = "there is no kernel behind this view";
    }
  }

  receive(message) {
    this.heardAt = performance.now();
    if (message.kind === "heard") this.heard = true;
    if (message.kind === "batch" && message.n > this.lastBatch) {
      this.complete ||= message.n === 1;
      this.lastBatch = message.n;
      this.take(message);
    }
    if (message.kind === "picture" && !this.complete && (message.for === this.id || message.for === "")) {
      this.complete = true;
      this.lastBatch = Math.max(this.lastBatch, message.n);
      this.redraw(message);
    }
  }

  // Start again from a picture: lines, curves, states.
  redraw(picture) {
    for (const lane of this.lanes.values()) lane.clear();
    for (const [rank, samples] of picture.curves ?? []) this.lane(rank).samples = samples;
    this.take({ ...picture, sampled: true });
  }

  take({ lanes = [], ranks, at, state, note, still, sampled }) {
    for (const [rank, rows] of lanes) this.lane(rank).queue(rows);
    if (ranks) {
      this.at = at;
      this.atWas = performance.now();
      this.showState({ state, note });
      for (const now of ranks) this.showRank(now, sampled);
      this.arrange();
    }
    if (still !== undefined) this.evidence.show(still);
    this.drawSoon();
  }

  showRank([rank, kind, words, rss, device, deviceMib, , node], sampled) {
    const lane = this.lane(rank);
    lane.showHost(node);
    lane.showState(kind, words);
    if (!sampled) lane.sample(this.at, rss, deviceMib);
    lane.showMemory(rss, device, deviceMib);
    if (kind === "failed") this.firstFailed ??= lane;
    if (kind === "failed" || kind === "consequence") this.jump.hidden = false;
  }

  showState({ state, note = "" }) {
    this.pill.textContent = STATES[state] ?? state;
    this.root.dataset.state = state;
    if (!this.unheard) this.note.textContent = note;
    if (state === "stopping") this.showStopping();
    // A rank that handles SIGTERM has time for that; to stop once more ends it at once.
    if ([...this.lanes.values()].some((lane) => lane.kind === "ending")) this.stop.removeAttribute("aria-disabled");
  }

  drawSoon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      for (const lane of this.lanes.values()) lane.draw();
    });
  }

  tick() {
    const [quiet, passed] = [this.heardAt, this.atWas].map((then) => (performance.now() - then) / 1000);
    // Between two messages the clock runs on by itself, but not for long: a dead kernel must not look alive.
    const at = this.at + Math.min(passed, SILENCE_S);
    this.elapsed.textContent = this.at ? duration(at) : "";
    this.evidence.tick(at);
    if (this.at && quiet > SILENCE_S) this.note.textContent = `no word from the kernel for ${Math.floor(quiet)} s`;
  }

  // Lanes.

  lane(rank) {
    let lane = this.lanes.get(rank);
    if (!lane) {
      lane = new Lane(rank, this);
      this.lanes.set(rank, lane);
      const after = [...this.lanes.values()].filter((other) => other.rank > rank).sort((a, b) => a.rank - b.rank)[0];
      this.grid.insertBefore(lane.root, after?.root ?? null);
      this.chips.insertBefore(lane.chip, after?.chip ?? null);
    }
    return lane;
  }

  // Open the lanes that matter. Few ranks: all. Many: those with something to say, and what the reader opened.
  arrange() {
    const lanes = [...this.lanes.values()].sort((a, b) => a.rank - b.rank);
    this.chips.hidden = lanes.length <= MOST_OPEN_LANES;
    const quiet = lanes.some((lane) => lane.kind === "silent");
    const spokeLast = quiet && lanes.reduce((a, b) => (b.spokeAt > a.spokeAt ? b : a));
    // A lane that is open stays open unless a weightier one needs its place: nothing jumps about under the reader.
    const weight = (lane) => lane.weight + (lane === spokeLast ? 3 : 0) + (lane.isOpen ? 0.5 : 0);
    const byWeight = [...lanes].sort((a, b) => weight(b) - weight(a) || a.rank - b.rank);
    const room = Math.max(this.places(lanes), lanes.filter((lane) => lane.chosen).length);
    byWeight.forEach((lane, i) => lane.open(lanes.length <= MOST_OPEN_LANES || (i < room && lane.chosen !== false)));
    if (this.isOver && lanes.length > MOST_OPEN_LANES)
      this.grid.prepend(...lanes.filter((lane) => lane.role === "culprit").map((lane) => lane.root));
    this.grid.dataset.lanes = lanes.filter((lane) => lane.isOpen).length;
  }

  // While it runs, as many lanes as fit. Once it is known who failed: those, and one that suffered from it.
  places(lanes) {
    const failed = this.isOver ? lanes.filter((lane) => lane.kind === "failed").length : 0;
    return failed ? Math.min(MOST_OPEN_LANES, failed + 1) : MOST_OPEN_LANES;
  }

  // The end.

  finish() {
    const final = this.model.get("final");
    if (!final?.over) return;
    clearInterval(this.ticker);
    this.unheard = false;
    if (!this.complete) this.redraw(final);
    this.complete = true;
    this.at = final.at ?? this.at;
    this.elapsed.textContent = this.at ? duration(this.at) : "";
    for (const lane of this.lanes.values()) lane.draw();
    this.showState({ state: final.state, note: final.note });
    this.hideStop();
    const ended = new Map(final.endings.map((ending) => [ending[0], ending]));
    for (const lane of this.lanes.values()) {
      if (ended.has(lane.rank)) lane.finish(ended.get(lane.rank), final);
      else lane.showState("ended", "did not start");
    }
    this.arrange();
    for (const lane of this.lanes.values()) lane.settle();
    this.jump.hidden = !this.firstError()?.firstError;
    this.evidence.finish(final.still, final.alike);
  }

  hideStop() {
    if (document.activeElement === this.stop) this.copy.focus();
    this.stop.hidden = true;
  }

  // What the buttons do.

  firstError() {
    const lanes = [...this.lanes.values()].sort((a, b) => a.rank - b.rank);
    const lane = lanes.find((l) => l.role === "culprit") ?? this.firstFailed ?? lanes.find((l) => l.kind === "failed");
    return lane?.firstError ? lane : lanes.find((l) => l.kind === "failed" && l.firstError) ?? lane;
  }

  showFirstError() {
    const lane = this.firstError();
    if (!lane) return;
    lane.choose(true);
    lane.draw();
    lane.showLine(lane.firstError);
  }

  askToStop() {
    this.say({ kind: "stop" });
    this.showStopping();
    setTimeout(() => {
      if (this.heard || this.isOver) return;
      this.unheard = true;
      this.note.textContent = "the kernel has not heard this yet; its own interrupt (■ in the toolbar) stops the job";
    }, UNHEARD_MS);
  }

  showStopping() {
    this.stop.textContent = "Stopping…";
    // Not `disabled`: that would throw the keyboard's focus out of the view.
    this.stop.setAttribute("aria-disabled", "true");
  }

  async copyCommand() {
    const copied = await copyText(this.model.get("job").command, this.root);
    this.copy.textContent = copied ? "Copied" : "Copying is not allowed here";
    setTimeout(() => (this.copy.textContent = "Copy command"), 1600);
  }
}

// One rank: its state, its memory, its lines.
class Lane {
  constructor(rank, view) {
    this.rank = rank;
    this.view = view;
    this.kind = "starting";
    this.spokeAt = -1;
    this.isOpen = false;
    this.samples = [];
    this.build();
    this.clear();
  }

  build() {
    this.words = make("span", "ddp-words", "starting");
    this.fault = make("strong", "ddp-fault");
    this.title = make("span", "ddp-rank", `rank ${this.rank}`);
    this.host = new Gauge(1);
    this.device = new Gauge(2);
    this.memory = make("span", "ddp-memory", this.host.root, this.device.root);
    const said = make("span", "ddp-said", this.words, this.fault);
    const head = make("div", "ddp-lane-head", this.title, said, this.memory);
    this.log = make("div", "ddp-log");
    for (const [name, value] of [["role", "log"], ["aria-live", "off"], ["tabindex", "0"], ["aria-label", `output of rank ${this.rank}`]])
      this.log.setAttribute(name, value);
    this.log.addEventListener("scroll", () => this.readerMoved(), { passive: true });
    this.follow = button("", () => this.followAgain(), "Follow the newest lines");
    this.follow.className = "ddp-follow";
    this.root = make("div", "ddp-lane", head, make("div", "ddp-log-frame", this.log, this.follow));
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", `rank ${this.rank}`);
    this.root.hidden = true;
    this.chipState = make("span", "", "starting");
    this.chip = button("", () => this.choose(!this.isOpen));
    this.chip.className = "ddp-chip";
    this.chip.append(make("b", "", `rank ${this.rank}`), this.chipState);
    this.showState("starting", "starting");
  }

  clear() {
    this.earlier = make("div", "ddp-gap");
    this.earlier.hidden = true;
    this.earlierLines = 0;
    this.log.replaceChildren(this.earlier);
    this.rows = [];
    this.size = 0;
    this.openRows = {};
    this.attempt = 0;
    this.lastStream = undefined;
    this.lastTime = undefined;
    this.gap = undefined;
    this.firstStderr = this.firstTraceback = undefined;
    this.following = true;
    this.unseen = 0;
    this.follow.hidden = true;
  }

  // State.

  showState(kind, words) {
    this.kind = kind;
    this.root.dataset.kind = this.chip.dataset.kind = kind;
    if (this.words.textContent !== words) this.words.textContent = words;
    this.chipState.textContent = kind;
    this.log.dataset.empty = ["starting", "running", "silent"].includes(kind) ? `no output yet: ${words}` : "no output";
  }

  // In a job of several agents, the host of the rank.
  showHost(node) {
    if (node) this.title.textContent = `rank ${this.rank} on ${node}`;
  }

  showMemory(rss, device, deviceMib) {
    if (rss != null) this.host.say(`${device ? "host " : ""}${count(rss)} MiB`);
    if (device) this.device.say(deviceMib == null ? device : `${device} ${count(deviceMib)} MiB`);
    this.host.draw(this.samples);
    this.device.draw(this.samples);
  }

  sample(...values) {
    this.samples.push(values);
    if (this.samples.length > MOST_SAMPLES) this.samples = this.samples.filter((_, i) => i % 2 === 0);
  }

  // How much this lane matters when there is not room for all.
  get weight() {
    if (this.chosen !== undefined) return this.chosen ? 100 : -100;
    if (this.role === "culprit") return 20;
    return { failed: 12, silent: 8, consequence: 4 }[this.kind] ?? 0;
  }

  choose(isOpen) {
    this.chosen = isOpen;
    this.view.arrange();
    this.view.drawSoon();
  }

  open(isOpen) {
    this.chip.setAttribute("aria-pressed", String(isOpen));
    if (isOpen === this.isOpen) return;
    this.isOpen = isOpen;
    this.root.hidden = !isOpen;
    if (isOpen && this.following) requestAnimationFrame(() => this.toBottom());
  }

  // Lines.

  queue(rows) {
    if (rows.length) this.spokeAt = rows[rows.length - 1][1];
    this.rows.push(...rows);
    // A hidden browser tab draws no frames: what would not stay on screen anyway is not kept for it.
    const excess = this.rows.length - 2 * MOST_LINES.open;
    if (excess > 0) {
      const dropped = this.rows.splice(0, excess + MOST_LINES.open);
      const lines = dropped.reduce((sum, row) => sum + (row[0] === GAP ? row[2] : 1 - row[4]), 0);
      this.rows.unshift([GAP, dropped[0][1], lines, dropped[dropped.length - 1][3], 0]);
    }
  }

  draw() {
    if (!this.rows.length) return;
    const rows = this.rows;
    this.rows = [];
    this.fragment = document.createDocumentFragment();
    for (const row of rows) this.addRow(row);
    this.log.append(this.fragment);
    this.trim();
    if (this.following) return this.toBottom();
    this.unseen += rows.filter((row) => row[0] !== GAP && !row[4]).length;
    this.showFollow();
  }

  addRow([stream, at, text, attempt, open, orBefore]) {
    if (attempt > this.attempt) this.addAttempt(attempt);
    if (stream === GAP) return this.addGap(text);
    const replaced = this.openRows[stream];
    delete this.openRows[stream];
    const row = replaced?.parentNode ? replaced : this.newRow(stream);
    row.lastChild.data = text;
    row.classList.toggle("ddp-table", TABLE.test(text));
    // When the rank wrote it, or the latest moment at which it can have written it.
    const time = (orBefore ? "≤" : "") + seconds(at);
    if (time !== this.lastTime) row.dataset.t = time;
    this.lastTime = time;
    if (open) this.openRows[stream] = row;
    if (stream === STDERR) this.noteError(row, text);
  }

  newRow(stream) {
    const row = make("div", stream === STDERR ? "ddp-line ddp-err" : "ddp-line");
    if (stream === STDERR && this.lastStream !== STDERR) {
      row.append(make("span", "ddp-tag", "err"));
    }
    row.append(document.createTextNode(""));
    row.lines = 1;
    this.lastStream = stream;
    this.gap = undefined;
    this.fragment.append(row);
    this.size += 1;
    return row;
  }

  addGap(lines) {
    if (!this.gap) {
      this.gap = make("div", "ddp-gap");
      this.gap.lines = 0;
      this.fragment.append(this.gap);
      this.size += 1;
    }
    this.gap.lines += lines;
    this.gap.textContent = missing(this.gap.lines, "not shown here", this.rank);
    this.lastStream = this.lastTime = undefined;
    this.openRows = {};
  }

  addAttempt(attempt) {
    this.attempt = attempt;
    const separator = make("div", "ddp-attempt", `attempt ${attempt + 1}`);
    separator.lines = 0;
    this.fragment.append(separator);
    this.size += 1;
    this.openRows = {};
    this.lastStream = this.lastTime = this.gap = undefined;
    this.firstStderr = this.firstTraceback = undefined;
  }

  noteError(row, text) {
    this.firstStderr ??= row;
    if (!this.firstTraceback && ERROR_LINE.test(text)) this.firstTraceback = row;
  }

  get firstError() {
    return this.marked ?? this.firstTraceback ?? this.firstStderr;
  }

  // Take the oldest rows out of the page. While the reader reads further up, more may stay.
  trim() {
    const most = MOST_LINES[this.isOpen ? "open" : "closed"] * (this.following ? 1 : 2);
    if (this.size <= most) return;
    for (; this.size > most; this.size--) {
      const oldest = this.earlier.nextSibling;
      this.earlierLines += oldest.lines;
      oldest.remove();
    }
    this.earlier.hidden = false;
    this.earlier.textContent = missing(this.earlierLines, "before these are not shown here", this.rank);
  }

  // Scrolling.

  toBottom() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  readerMoved() {
    const atBottom = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 6;
    if (atBottom === this.following || !this.isOpen) return;
    this.following = atBottom;
    this.unseen = 0;
    this.showFollow();
  }

  showFollow() {
    this.follow.hidden = this.following || this.view.isOver;
    this.follow.textContent = this.unseen ? `${count(this.unseen)} new line${this.unseen === 1 ? "" : "s"} ↓` : "Follow ↓";
  }

  followAgain() {
    this.following = true;
    this.unseen = 0;
    this.showFollow();
    this.toBottom();
    this.log.focus({ preventScroll: true });
  }

  showLine(row) {
    const fold = row?.closest("[hidden]");
    if (fold?.toggle) fold.toggle();
    this.log.focus({ preventScroll: true });
    this.root.scrollIntoView({ block: "nearest" });
    if (!row?.isConnected) return;
    this.log.scrollTop = row.offsetTop - 24;
    row.classList.remove("ddp-flash");
    void row.offsetWidth;
    row.classList.add("ddp-flash");
  }

  // The end.

  finish([, role, words, type, message, line, peak], { alike }) {
    this.role = role;
    this.root.dataset.role = role;
    // Ranks that were only told to end have suffered nothing that could be folded.
    const suffered = role === "consequence" && (type || words.endsWith(CONSEQUENCE));
    const kinds = { culprit: "failed", own: "failed", failed: "failed", passed: "passed" };
    this.showState(suffered ? "consequence" : kinds[role] ?? "ended", words.replace(CONSEQUENCE, ""));
    const fault = alike ? "every rank alike" : "at fault";
    this.fault.textContent = suffered ? "a consequence" : role === "culprit" && words !== GONE ? fault : "";
    if (peak != null) this.host.say(`peak ${count(peak)} MiB`);
    if (role === "culprit") this.mark(type, message, line);
    if (suffered) this.fold(type, message, words);
  }

  // Draw a rule beside the error's own lines, and quote the source line that raised it.
  mark(type, message, line) {
    const lines = message.trim().split("\n");
    const rows = [...this.log.querySelectorAll(".ddp-err")];
    const first = lines[0] ? `${type}: ${lines[0]}` : type;
    const start = rows.findIndex((row) => type && row.lastChild.data.includes(first));
    if (start < 0) return;
    const block = rows.slice(start, start + lines.length);
    for (const row of block) row.classList.add("ddp-mark");
    this.marked = block[0];
    this.marked.classList.add("ddp-marked");
    if (!line) return;
    const quoted = make("div", "ddp-line ddp-mark ddp-quoted", line);
    quoted.lines = 0;
    block[block.length - 1].after(quoted);
  }

  // Put the error lines of a rank that only suffered under one line that opens.
  fold(type, message, words) {
    const rows = [...this.log.querySelectorAll(".ddp-err")];
    const folded = rows.slice(Math.max(0, rows.indexOf(this.firstTraceback)));
    if (!folded.length) return;
    const inside = make("div", "ddp-folded");
    // "[…/pair.cc:547] Connection closed by peer [127.0.0.1]:49566. This is typically …": its first sentence, without the places.
    const what = message.trim().split("\n")[0].replace(/\s*\[[^\]]*\](:\d+)?/g, "").split(". ")[0].trim().slice(0, 100);
    const label = `consequence, folded: ${what || type || words} (${count(folded.length)} line${folded.length === 1 ? "" : "s"})`;
    const fold = button(label, () => inside.toggle());
    fold.className = "ddp-fold";
    inside.toggle = () => {
      inside.hidden = !inside.hidden;
      fold.setAttribute("aria-expanded", String(!inside.hidden));
    };
    fold.lines = inside.lines = 0;
    folded[0].before(fold, inside);
    inside.append(...folded);
    inside.toggle();
  }

  // After the last line: the error in sight, unless the reader is elsewhere.
  settle() {
    this.showFollow();
    if (!this.following || !this.isOpen) return;
    this.toBottom();
    if (this.marked && this.marked.offsetTop < this.log.scrollTop) this.log.scrollTop = this.marked.offsetTop - 24;
  }
}

// One figure of a rank's memory with its curve. `column`: its place in a sample. A rank that has ended keeps its last.
class Gauge {
  constructor(column) {
    this.column = column;
    this.line = svg("polyline", {});
    const curve = svg("svg", { class: "ddp-curve", viewBox: "0 0 88 18", "aria-hidden": "true" });
    curve.append(this.line);
    this.text = make("span");
    this.root = make("span", "ddp-gauge", curve, this.text);
    this.root.hidden = true;
  }

  say(text) {
    this.text.textContent = text;
    this.root.hidden = false;
  }

  draw(samples) {
    const known = samples.filter((sample) => sample[this.column] != null);
    if (known.length < 2) return this.line.setAttribute("points", "");
    const from = samples[0][0];
    const span = Math.max(1, samples[samples.length - 1][0] - from);
    const most = Math.max(1, ...known.map((sample) => sample[this.column]));
    const place = (sample) => `${(2 + (84 * (sample[0] - from)) / span).toFixed(1)},${(16 - (13 * sample[this.column]) / most).toFixed(1)}`;
    this.line.setAttribute("points", known.map(place).join(" "));
  }
}

// Small makers and words.

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function button(text, onClick, title = "") {
  const element = make("button", "ddp-button", text);
  element.type = "button";
  element.title = title;
  element.addEventListener("click", () => element.getAttribute("aria-disabled") !== "true" && onClick());
  return element;
}

function missing(lines, where, rank) {
  return `${count(lines)} line${lines === 1 ? "" : "s"} ${where}; all are in run.ranks[${rank}].stdout`;
}

function count(number) {
  return number.toLocaleString("en-US");
}

function seconds(at) {
  return at < 100 ? at.toFixed(2) : at < 1000 ? at.toFixed(1) : at.toFixed(0);
}

function duration(s) {
  if (s < 100) return `${s.toFixed(1)} s`;
  const [minutes, rest] = [Math.floor(s / 60), Math.floor(s % 60)];
  return minutes < 60 ? `${minutes} min ${rest} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

async function copyText(text, near) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Not allowed, or a page without https: the old way.
    const field = make("textarea", "ddp-off");
    field.value = text;
    near.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}

// Scrolling does nothing in a page part that is not laid out, and lines wrap anew where it gets wider: call `then` after both.
function onNewWidth(element, then) {
  let width = 0;
  const observer = new ResizeObserver(([entry]) => {
    if (entry.contentRect.width && entry.contentRect.width !== width) then();
    width = entry.contentRect.width;
  });
  observer.observe(element);
  return () => observer.disconnect();
}

// Light or dark, as the front end says: JupyterLab, VS Code, Colab, else the browser.
function followTheme(root) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const { body, documentElement: page } = document;
    const lab = body.dataset.jpThemeLight;
    const dark = lab ? lab === "false"
      : body.dataset.vscodeThemeKind ? !/light/.test(body.dataset.vscodeThemeKind)
      : page.hasAttribute("theme") ? page.getAttribute("theme") === "dark"
      : system.matches;
    root.dataset.theme = dark ? "dark" : "light";
  };
  const observer = new MutationObserver(apply);
  for (const element of [document.body, document.documentElement]) observer.observe(element, { attributes: true });
  system.addEventListener("change", apply);
  apply();
  return () => {
    observer.disconnect();
    system.removeEventListener("change", apply);
  };
}
