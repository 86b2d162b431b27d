// Sphinx's scores of search results, with the pages for engineers behind those for users.
const ENGINEERS =
  /^(benchmarks|build_notes|changelog|contributing|licence|mosaic_gpu|triton)$|_stages$/;
var Scorer = {
  score: ([page, title, anchor, description, score]) => score - 4 * ENGINEERS.test(page),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
