// A click on a column's head sorts by it, and another click reverses the order.
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, row = head.parentElement, body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "descending";
  for (const other of row.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "ascending" : "descending");
  const value = line => line.cells[head.cellIndex].dataset.value ?? line.cells[head.cellIndex].textContent;
  const order = (a, b) => a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : String(a).localeCompare(String(b));
  [...body.rows].sort((a, b) => (down ? 1 : -1) * order(value(a), value(b))).forEach(line => body.append(line));
});
