// A page is found by its title, its index entries and its words: show it once, where it was found first, with the part of the site it is in.
const PARTS = { "nbs/howto/": "How-to", "nbs/tutorials/": "Tutorial", "docs/reference/": "Reference", "nbs/": "Inside", "api/": "Inside" };
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const all = Search._performSearch;
  Search._performSearch = (...query) => {
    const seen = new Set();
    const isFirst = ([page, , anchor, , , , kind]) => {
      const key = kind === "object" && !anchor.startsWith("#module-") ? page + anchor : page;
      return !seen.has(key) && seen.add(key);
    };
    const withPart = ([page, title, anchor, text, ...rest]) => {
      const part = PARTS[Object.keys(PARTS).find((prefix) => page.startsWith(prefix))];
      return [page, title, anchor, text || part, ...rest];
    };
    return all(...query).reverse().filter(isFirst).map(withPart).reverse();  // the last is shown first
  };
});
