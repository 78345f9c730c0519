/* The search of the site: MiniSearch over what search_pages.js says of each page. Words are compared by their stems. A word that no page has
   is read as one that is being typed, or as a typing error. */
const nbtrainSearch = (() => {
  const BOOSTS = { title: 8, words: 6, headings: 2.5, line: 2, text: 1, code: 0.7 };
  const KINDS = { "How-to": 1.7, Reference: 1.25, Page: 1.25, Tutorial: 1.15, Chapter: 0.7, Module: 0.5 };
  const LIST = 0.5, PART = 0.85;  // a page that names all others; a part of a page, of which the whole is found as well
  const EXACT = 1, BEGUN = 0.8, MEANT = 0.7, BESIDE = 0.6;  // how sure it is that a word is the one that was typed
  const NEAR = 5, SHOWN = 40;
  const STOP = new Set(`a about after all also am an and any are as at be before but by can cannot can't could did do does doesn doesn't don don't
    each for from get getting give had has have how i if in instead into is isn isn't it its me my nbtrain not of on or our should so some than
    that the their them then there these they this to too up use used using want was we were what when where which while who why will with
    without would you your`.split(/\s+/));

  const stemmer = new EnglishStemmer(), stemmed = new Map(), stems = new Set();  // the stems are those of the pages
  const surfaces = new Map();  // each word as it is written: its stem, and how well it is known
  const stem = (word) => {
    if (!stemmed.has(word)) {
      const spelled = word.length > 6 ? word.replace(/is(e|ed|er|es|ing|ation|ations)$/, "iz$1") : word;  // optimise, quantisation
      stemmed.set(word, stemmer.stemWord(spelled));
    }
    return stemmed.get(word);
  };
  const splitCamel = (word) => word.split(/(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})/);

  /** The words of a text, each with the parts that it is made of: `save_top_k`, `torch.compile`, `EarlyStopping` and `fine-tune` have some. */
  const read = (text) => {
    const found = [];
    for (const [chunk] of text.matchAll(/[\p{L}\p{N}_]+(?:[.\-&'’:/][\p{L}\p{N}_]+)*/gu)) {
      const parts = chunk.split(/[^\p{L}\p{N}]+/u).filter(Boolean).flatMap(splitCamel).map((part) => part.toLowerCase());
      found.push({ parts, joined: parts.length > 1 && parts.length < 6 ? parts.join("") : null });
    }
    return found;
  };
  const isWord = (part) => part.length > 1 || /\p{N}|[^\x00-\x7f]/u.test(part);
  const inField = (text, field) => {
    const known = field === "title" || field === "words" || field === "headings" ? 100 : 1;
    const words = read(text), terms = [];
    const keep = (word) => {
      const seen = surfaces.get(word);
      if (seen) seen.known += known;
      else surfaces.set(word, { stem: stem(word), known });
      stems.add(stem(word));
      terms.push(stem(word));
    };
    words.forEach(({ parts, joined }, i) => {
      parts.filter(isWord).forEach(keep);
      if (joined) keep(joined);
      const next = words[i + 1];
      if (known > 1 && next && parts.length === 1 && next.parts.length === 1) keep(parts[0] + next.parts[0]);  // "data loader" is a dataloader
    });
    return terms;
  };

  /** How many letters differ; two that are exchanged count as one. More than `most` is Infinity. */
  const distance = (a, b, most) => {
    if (Math.abs(a.length - b.length) > most) return Infinity;
    let [before, last] = [[], Array.from({ length: b.length + 1 }, (_, j) => j)];
    for (let i = 1; i <= a.length; i++) {
      const row = [i];
      for (let j = 1; j <= b.length; j++) {
        row[j] = Math.min(row[j - 1] + 1, last[j] + 1, last[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1));
        if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) row[j] = Math.min(row[j], before[j - 2] + 1);
      }
      if (Math.min(...row) > most) return Infinity;
      [before, last] = [last, row];
    }
    return last[b.length] <= most ? last[b.length] : Infinity;
  };
  const best = (words) => {
    const stems = new Map();
    words.sort((a, b) => b[1].known - a[1].known).forEach(([word, { stem }]) => stems.size < NEAR && !stems.has(stem) && stems.set(stem, word));
    return stems;
  };
  const meant = (word) => {
    const most = word.length < 4 ? 0 : word.length < 7 ? 1 : 2;
    let near = [], least = most;
    for (const entry of most ? surfaces : []) {
      const found = distance(word, entry[0], least);
      if (found < least) [near, least] = [[], found];
      if (found === least && entry[1].known >= 5) near.push(entry);  // rarer words are often typing errors themselves
    }
    return best(near);
  };

  let index, documents, counts, total;
  const prepare = () => {
    if (index) return;
    documents = window.nbtrainPages.map((page, id) => ({ ...page, id }));
    index = new MiniSearch({
      fields: Object.keys(BOOSTS),
      extractField: (page, field) => (field === "headings" ? (page.headings || []).map(([text]) => text).join(" | ") : page[field]),
      tokenize: inField,
      processTerm: (term) => term,
    });
    index.addAll(documents);
    total = documents.length;
    counts = new Map();
  };
  const factor = (id) => KINDS[documents[id].kind] * (documents[id].list ? LIST : 1) * (documents[id].page ? PART : 1);
  const find = (term, boost) =>
    index.search(term, { tokenize: (text) => [text], boost: BOOSTS, boostDocument: factor, boostTerm: () => boost, bm25: { k: 1.2, b: 0.5, d: 0.5 } });

  /** What each word of a query stands for: stems, with how sure that is. */
  const understand = (query) => {
    const words = read(query.slice(0, 300)), terms = [];
    const flat = words.flatMap(({ parts }) => parts);
    const said = flat.filter((part) => !STOP.has(part) && isWord(part));
    for (const part of new Set(said.length ? said : flat.filter(isWord))) {
      if (stems.has(stem(part))) { terms.push({ part, stems: new Map([[stem(part), part]]), sure: EXACT }); continue; }
      const isLast = part === flat.at(-1) && part.length > 1;
      const begun = isLast ? best([...surfaces].filter(([word, { known }]) => word.startsWith(part) && known > 1)) : new Map();
      if (begun.size) terms.push({ part, stems: begun, sure: BEGUN });
      else terms.push({ part, stems: meant(part), sure: MEANT, isMeant: true });
    }
    const joined = new Map();
    words.forEach((word, i) => {
      const next = words[i + 1];
      if (next && word.parts.length === 1 && next.parts.length === 1) joined.set(stem(word.parts[0] + next.parts[0]), BESIDE);
      if (word.joined) joined.set(stem(word.joined), EXACT);
    });
    return { terms, joined: new Map([...joined].filter(([term]) => stems.has(term))) };
  };

  /** The pages that a query means, the best first, each once: [{address, kind, title, page, score, ...}]. */
  const search = (query) => {
    prepare();
    const { terms, joined } = understand(query);
    const scores = new Map();
    let weights = 0;
    const rows = terms.map(({ stems, sure }) => {
      const row = new Map();
      for (const term of stems.keys()) for (const { id, score } of find(term, sure)) row.set(id, Math.max(row.get(id) ?? 0, score));
      const weight = row.size ? Math.log(1 + total / row.size) : 0;  // a rare word says more
      weights += weight;
      return { row, weight };
    });
    for (const { row, weight } of rows)
      for (const [id, score] of row) {
        const sum = scores.get(id) ?? { score: 0, met: 0 };
        scores.set(id, { score: sum.score + score, met: sum.met + weight / weights });
      }
    for (const [term, sure] of joined)
      for (const { id, score } of find(term, sure)) {
        const sum = scores.get(id) ?? { score: 0, met: 0.5 };
        scores.set(id, { ...sum, score: sum.score + score });
      }
    const all = new Set(terms.flatMap((term) => [...term.stems.keys()]).concat([...joined.keys()]));
    const found = [...scores].map(([id, { score, met }]) => ({ ...documents[id], score: score * met * met * named(documents[id], query, terms) }));
    found.sort((a, b) => b.score - a.score);
    const seen = new Set(), pages = [];
    for (const page of found) {
      const place = page.address.split("#")[0];
      if (!seen.has(place) && seen.add(place)) pages.push({ ...page, address: page.address.includes("#") ? page.address : place + anchor(page, terms) });
    }
    return { pages, stems: all, meant: terms.filter((term) => term.isMeant && term.stems.size).map(({ part, stems }) => [part, [...stems.values()][0]]) };
  };
  const stemsOf = (text) => new Set(read(text).flatMap(({ parts, joined }) => [...parts, ...(joined ? [joined] : [])].map(stem)));
  const hasAll = (text, terms) => {
    const stems = stemsOf(text);
    return terms.length > 0 && terms.every((term) => [...term.stems.keys()].some((each) => stems.has(each)));
  };
  const phrase = (text) => read(text).flatMap(({ parts }) => parts).filter((part) => !STOP.has(part)).map(stem).join(" ");
  /** How much more a page counts whose title, heading or other name is the query, or whose title has all its words. */
  const named = (page, query, terms) => {
    page.names ??= new Set([page.title, ...(page.words ?? "").split(", "), ...(page.headings ?? []).map(([text]) => text)].map(phrase));
    return page.names.has(phrase(query)) ? 1.6 : hasAll(page.title, terms) ? 1.3 : 1;
  };
  /** The heading that a query names, if the title of its page doesn't. */
  const anchor = (page, terms) => {
    if (hasAll(page.title, terms)) return "";
    const heading = (page.headings || []).find(([text]) => hasAll(text, terms));
    return heading ? `#${heading[1]}` : "";
  };

  // -- what is shown
  const isFound = (word, stems) => {
    const parts = splitCamel(word).map((part) => part.toLowerCase());
    return [...parts, parts.join("")].some((part) => isWord(part) && !STOP.has(part) && stems.has(stem(part)));
  };
  const marked = (text, stems) => {
    const pieces = document.createDocumentFragment();
    for (const piece of text.split(/([\p{L}\p{N}]+)/u)) {
      const isMarked = /[\p{L}\p{N}]/u.test(piece) && isFound(piece, stems);
      pieces.append(isMarked ? Object.assign(document.createElement("mark"), { textContent: piece }) : piece);
    }
    return pieces;
  };
  /** About 180 characters of a page, where most of the words are. */
  const excerpt = (page, stems) => {
    const text = page.text ?? "", line = page.line ?? "";
    const places = [...text.matchAll(/[\p{L}\p{N}]+/gu)].filter(([word]) => isFound(word, stems)).map((match) => [match.index, stem(match[0].toLowerCase())]);
    const within = (start) => new Set(places.filter(([at]) => at >= start && at < start + 150).map(([, term]) => term)).size;
    const inLine = new Set([...line.matchAll(/[\p{L}\p{N}]+/gu)].filter(([word]) => isFound(word, stems)).map(([word]) => stem(word.toLowerCase()))).size;
    const [start, most] = places.reduce(([at, n], [here]) => (within(here) > n ? [here, within(here)] : [at, n]), [0, 0]);
    if (line && most <= inLine) return line;
    const from = start < 60 ? 0 : Math.max(text.lastIndexOf(" ", start - 30) + 1, text.lastIndexOf(". ", start) + 2 > start - 60 ? text.lastIndexOf(". ", start) + 2 : 0);
    const to = text.length <= from + 180 ? text.length : text.lastIndexOf(" ", from + 180);
    return `${from ? "… " : ""}${text.slice(from, to)}${to < text.length ? " …" : ""}`;
  };
  const element = (tag, attributes, ...children) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  };
  const shown = (page, stems) => {
    const title = element("span", { className: "title" }, marked(page.page ? `${page.page}: ${page.title}` : page.title, stems));
    const kind = element("span", { className: "kind" }, page.kind);
    const link = element("a", { href: page.address }, title, " ", kind);
    return element("li", {}, link, element("p", {}, marked(excerpt(page, stems), stems)));
  };

  const start = () => {
    const field = document.querySelector(".find input"), list = document.querySelector("#search-results"), status = document.querySelector("#search-status");
    const links = () => [...list.querySelectorAll("a")];
    const show = () => {
      const query = field.value.trim();
      const { pages, stems, meant } = query ? search(query) : { pages: [], stems: new Set(), meant: [] };
      list.replaceChildren(...pages.slice(0, SHOWN).map((page) => shown(page, stems)));
      const read = meant.map(([typed, word]) => `“${typed}” is read as “${word}”. `).join("");
      const n = pages.length > SHOWN ? `The first ${SHOWN} of ${pages.length} pages.` : pages.length === 1 ? "1 page." : `${pages.length} pages.`;
      status.textContent = !query ? "" : pages.length ? read + n : "No page has these words.";
      if (location.protocol !== "file:") history.replaceState(null, "", query ? `?q=${encodeURIComponent(query)}` : location.pathname);
    };
    const move = (step) => {
      const all = links(), at = all.indexOf(document.activeElement);
      (at + step < 0 ? field : all[Math.min(at + step, all.length - 1)])?.focus();
    };
    field.value = new URLSearchParams(location.search).get("q") ?? "";
    field.addEventListener("input", show);
    field.form.addEventListener("submit", (event) => { event.preventDefault(); links()[0]?.click(); });
    document.addEventListener("keydown", (event) => {
      const isHere = event.target === field || list.contains(event.target);
      if (!isHere || event.ctrlKey || event.altKey || event.metaKey || !["ArrowDown", "ArrowUp", "Escape"].includes(event.key)) return;
      event.preventDefault();
      if (event.key === "Escape") { field.focus(); field.select(); } else move(event.key === "ArrowDown" ? 1 : -1);
    });
    show();
    field.focus();
  };
  if (typeof document !== "undefined") document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();
  return { search };
})();
