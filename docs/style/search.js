/* The search of the site: MiniSearch over what search_pages.js says of each page. Words are compared by their stems. A word that no page
   has is read as one that is being typed, or as a typing error. */
const nbtrainSearch = (() => {
  const BOOSTS = { title: 7, words: 6, headings: 2.5, line: 2, text: 1, code: 0.7 };
  const KINDS = { "How-to": 1.9, Page: 1.25, Reference: 1.15, Tutorial: 1.15, Chapter: 0.7 };
  const LIST = 0.5, PART = 0.75;  // a page that names all others; a part of a page, of which the whole is found as well
  const LIKE = 4;  // how much more a page counts that is called what is asked for
  const EXACT = 1, BEGUN = 0.8, MEANT = 0.7, BESIDE = 0.6;  // how sure it is that a word is the one that was typed
  // A word of a short title says more than one of a long title; of a text this is less so.
  const IN_TITLE = { fields: ["title"], bm25: { k: 1.2, b: 0.9, d: 0.5 } };
  const ELSEWHERE = { fields: Object.keys(BOOSTS).slice(1), bm25: { k: 1.2, b: 0.4, d: 0.5 } };
  const KNOWN = 100, RARE = 5;  // a word of a title counts as much as so many of a text; rarer ones may be typing errors themselves
  const NEAR = 5, SHOWN = 40;
  const STOP = new Set(`a about after all also am an and any are as at be before but by can cannot can't could did do does doesn doesn't don
    don't each every exist existing for from get getting give had has have how i if in instead into is isn isn't it its me more most my
    nbtrain need not of often on once or our per possible should so some than that the their them then there these they this to too up use
    used using want was we were what when where which while who why will with without would you your`.split(/\s+/));

  const stemmer = new EnglishStemmer(), stemmed = new Map(), stems = new Set();  // the stems are those of the pages
  const spellings = new Map(Object.entries(window.nbtrainSpellings));
  const surfaces = new Map();  // each word as it is written: its stem, and how well it is known
  const stem = (word) => {
    if (!stemmed.has(word)) {
      const known = spellings.get(word) ?? word;
      const spelled = known.length > 6 ? known.replace(/is(e|ed|er|es|ing|ation|ations)$/, "iz$1") : known;  // optimise, quantisation
      stemmed.set(word, stemmer.stemWord(spelled.replace(/^([cgtx]pu)s$/, "$1")));  // the stemmer takes GPUs for Latin
    }
    return stemmed.get(word);
  };
  const splitCamel = (word) => word.split(/(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})/);

  /** The words of a text, each with the parts that it is made of: `save_top_k`, `torch.compile` and `EarlyStopping` have some. */
  const chunks = new Map();
  const readChunk = (chunk) => {
    if (!chunks.has(chunk)) {
      const parts = chunk.split(/[^\p{L}\p{N}]+/u).filter(Boolean).flatMap(splitCamel).map((part) => part.toLowerCase());
      chunks.set(chunk, { parts, joined: parts.length > 1 && parts.length < 6 ? parts.join("") : null });
    }
    return chunks.get(chunk);
  };
  const read = (text) => (text.match(/[\p{L}\p{N}_]+(?:[.\-&'’:/][\p{L}\p{N}_]+)*/gu) ?? []).map(readChunk);
  const isPair = (words, i) => words[i].parts.length === 1 && words[i + 1]?.parts.length === 1;  // "data loader" is a dataloader
  const isWord = (part) => part.length > 1 || /\p{N}|[^\x00-\x7f]/u.test(part);
  const inField = (text, field) => {
    const known = field === "title" || field === "words" || field === "headings" ? KNOWN : 1;
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
      if (known > 1 && isPair(words, i)) keep(parts[0] + words[i + 1].parts[0]);
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
    const found = new Map();
    for (const [word, { stem }] of words.sort((a, b) => b[1].known - a[1].known))
      if (found.size < NEAR && !found.has(stem)) found.set(stem, word);
    return found;
  };
  const letters = (word) => [...word].sort().join("");
  const meant = (word) => {
    const most = word.length < 4 ? 0 : word.length < 7 ? 1 : 2;
    let near = [], least = most;
    for (const entry of most ? surfaces : []) {
      if (entry[1].known < RARE) continue;
      const found = distance(word, entry[0], least);
      if (found < least) [near, least] = [[], found];
      if (found === least) near.push(entry);
    }
    const exchanged = near.filter(([other]) => letters(other) === letters(word));  // presicion is precision, although prediction is as near
    return best(exchanged.length ? exchanged : near);
  };

  let index, documents;
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
  };
  const factor = (id) => KINDS[documents[id].kind] * (documents[id].list ? LIST : 1) * (documents[id].page ? PART : 1);
  /** How well each page has a stem: its number, with a score. */
  const find = (term, sure) => {
    const options = { tokenize: (text) => [text], boost: BOOSTS, boostDocument: factor, boostTerm: () => sure };
    const scores = new Map();
    for (const fields of [IN_TITLE, ELSEWHERE])
      for (const { id, score } of index.search(term, { ...options, ...fields })) scores.set(id, (scores.get(id) ?? 0) + score);
    return scores;
  };

  /** What each word of a query stands for: stems, with how sure that is. */
  const understand = (query) => {
    const words = read(query.slice(0, 300)), terms = [];
    const flat = words.flatMap(({ parts }) => parts);
    const said = flat.filter((part) => !STOP.has(part) && isWord(part) && !/^\p{N}+$/u.test(part));
    for (const part of new Set(said.length ? said : flat.filter(isWord))) {
      if (stems.has(stem(part))) { terms.push({ part, stems: new Map([[stem(part), part]]), sure: EXACT }); continue; }
      const isLast = part === flat.at(-1) && part.length > 1;
      const begun = isLast ? best([...surfaces].filter(([word, { known }]) => word.startsWith(part) && known > 1)) : new Map();
      const near = begun.size ? begun : meant(part);
      if (near.size) terms.push({ part, stems: near, sure: begun.size ? BEGUN : MEANT, isMeant: !begun.size });
    }
    const joined = new Map();
    words.forEach((word, i) => {
      if (isPair(words, i)) joined.set(stem(word.parts[0] + words[i + 1].parts[0]), BESIDE);
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
      for (const term of stems.keys()) 
        for (const [id, score] of find(term, sure)) row.set(id, Math.max(row.get(id) ?? 0, score));
      const weight = row.size ? Math.log(1 + documents.length / row.size) : 0;  // a rare word says more
      weights += weight;
      return { row, weight };
    });
    for (const { row, weight } of rows)
      for (const [id, score] of row) {
        const sum = scores.get(id) ?? { score: 0, met: 0 };
        scores.set(id, { score: sum.score + score, met: sum.met + weight / weights });
      }
    for (const [term, sure] of joined)
      for (const [id, score] of find(term, sure)) {
        const sum = scores.get(id) ?? { score: 0, met: 0.5 };
        scores.set(id, { ...sum, score: sum.score + score });
      }
    const all = new Set(terms.flatMap((term) => [...term.stems.keys()]).concat([...joined.keys()]));
    const found = [...scores].map(([id, { score, met }]) => {
      const page = documents[id];
      return { ...page, score: score * met ** 2 * (1 + LIKE * likeness(page, terms) ** 3) };
    });
    found.sort((a, b) => b.score - a.score);
    const seen = new Set(), pages = [];
    for (const page of found) {
      const place = page.address.split("#")[0];
      if (seen.has(place)) continue;
      seen.add(place);
      pages.push(page.address === place ? { ...page, address: place + anchor(page, terms) } : page);
    }
    return { pages, stems: all, meant: terms.filter((term) => term.isMeant).map(({ part, stems }) => [part, [...stems.values()][0]]) };
  };
  const stemsOf = (text) => new Set(read(text).flatMap(({ parts, joined }) => [...parts, ...(joined ? [joined] : [])]).map(stem));
  const isIn = (term, stems) => [...term.stems.keys()].some((each) => stems.has(each));
  const hasAll = (text, terms) => {
    const stems = stemsOf(text);
    return terms.length > 0 && terms.every((term) => isIn(term, stems));
  };
  const namesOf = (page) => {
    const names = page.kind === "Chapter" ? [] : [page.title, ...(page.words ?? "").split(", ")];
    return names.map((name) => new Set(read(name).flatMap(({ parts }) => parts).filter((part) => !STOP.has(part)).map(stem)));
  };
  /** How much of a title or another name of a page is the query, and of the query is that name: up to 1. */
  const likeness = (page, terms) => {
    page.names ??= namesOf(page);
    let most = 0;
    for (const name of page.names) {
      const n = terms.filter((term) => isIn(term, name)).length;
      if (n) most = Math.max(most, n / (name.size + terms.length - n));
    }
    return most;
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
  /** The line of a page, or about 180 characters of its text if these have more of the words. */
  const excerpt = ({ text = "", line = "" }, stems) => {
    const places = (said) =>
      [...said.matchAll(/[\p{L}\p{N}]+/gu)].filter(([word]) => isFound(word, stems)).map((at) => [at.index, stem(at[0].toLowerCase())]);
    const inText = places(text);
    const within = (start) => new Set(inText.filter(([at]) => at >= start && at < start + 150).map(([, term]) => term)).size;
    const [start, most] = inText.reduce(([at, n], [here]) => (within(here) > n ? [here, within(here)] : [at, n]), [0, 0]);
    if (line && most <= new Set(places(line).map(([, term]) => term)).size) return line;
    const sentence = text.lastIndexOf(". ", start) + 2;
    const from = start < 60 ? 0 : sentence > start - 60 ? sentence : text.lastIndexOf(" ", start - 30) + 1;
    const to = text.length <= from + 180 ? text.length : text.lastIndexOf(" ", from + 180);
    return `${from ? "… " : ""}${text.slice(from, to)}${to < text.length ? " …" : ""}`;
  };
  const element = (tag, attributes, ...children) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  };
  const fullTitle = ({ page, title }) => (page && !title.startsWith(`${page}.`) ? `${page}: ${title}` : title);
  const shown = (page, stems) => {
    const title = element("span", { className: "title" }, marked(fullTitle(page), stems));
    const kind = element("span", { className: "kind" }, page.kind);
    const link = element("a", { href: page.address }, title, " ", kind);
    return element("li", {}, link, element("p", {}, marked(excerpt(page, stems), stems)));
  };

  const start = () => {
    const [field, list, status] = [".find input", "#search-results", "#search-status"].map((place) => document.querySelector(place));
    const links = () => [...list.querySelectorAll("a")];
    const show = () => {
      const query = field.value.trim();
      const { pages, stems, meant } = query ? search(query) : { pages: [], stems: new Set(), meant: [] };
      list.replaceChildren(...pages.slice(0, SHOWN).map((page) => shown(page, stems)));
      const corrected = meant.map(([typed, word]) => `“${typed}” is read as “${word}”. `).join("");
      const pagesOf = (n) => `${n} page${n === 1 ? "" : "s"}.`;
      const n = pages.length > SHOWN ? `The first ${SHOWN} of ${pagesOf(pages.length)}` : pagesOf(pages.length);
      status.textContent = !query ? "" : pages.length ? corrected + n : "No page has these words.";
      if (location.protocol !== "file:") history.replaceState(null, "", query ? `?q=${encodeURIComponent(query)}` : location.pathname);
    };
    const move = (step) => {
      const all = links(), to = all.indexOf(document.activeElement) + step;
      (to < 0 ? field : all[Math.min(to, all.length - 1)])?.focus();
    };
    field.addEventListener("input", show);
    field.form.addEventListener("submit", (event) => {
      event.preventDefault();
      links()[0]?.click();
    });
    document.addEventListener("keydown", (event) => {
      const isHere = [field, document.body].includes(event.target) || list.contains(event.target);
      const does = { ArrowDown: () => move(1), ArrowUp: () => move(-1), Escape: () => field.select() }[event.key];
      if (!does || !isHere || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      does();
    });
    field.value = new URLSearchParams(location.search).get("q") ?? "";
    if (!field.value || matchMedia("(hover: hover)").matches) field.focus();  // on a phone its keyboard would hide the results
    if (field.value) status.textContent = "Reading the pages …";
    setTimeout(show);
  };
  if (typeof document !== "undefined") document.addEventListener("DOMContentLoaded", start);
  return { search };
})();
