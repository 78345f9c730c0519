// What a person looks for is first a how-to page, then the reference by topic, then other pages; the modules and chapters come last.
const DOORS = { "nbs/howto/": 8, "docs/reference/": 6, "docs/": 5, "nbs/tutorials/": 4 };
var Scorer = {
  score: ([page, title, anchor, text, score, file, kind]) => {
    const door = !page.endsWith("/index") && Object.keys(DOORS).find((prefix) => page.startsWith(prefix));  // an index has the words of all its pages
    const named = page.startsWith("docs/reference/") && kind === "title";  // the entry of a public name
    return score + (door ? DOORS[door] : 0) + (named ? 15 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
