// A page is found by its title, its index entries and its words: show it once, where it was found first.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const all = Search._performSearch;
  Search._performSearch = (...query) => {
    const seen = new Set();
    const isFirst = ([page, , anchor, , , , kind]) => {
      const key = kind === "object" ? page + anchor : page;
      return !seen.has(key) && seen.add(key);
    };
    return all(...query).reverse().filter(isFirst).reverse();  // the last is shown first
  };
});
