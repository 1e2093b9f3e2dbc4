// Package markdown formats the tables of the benchmarks.
package markdown

import (
	"strings"
	"unicode/utf8"
)

// Table contains the rows of a Markdown table, the head first. Its text is aligned in columns.
type Table [][]string

// Row adds a row.
func (t *Table) Row(cells ...string) { *t = append(*t, cells) }

// Text returns the table as text. If numbers is true, all columns except the first are right-aligned.
func (t Table) Text(numbers bool) string {
	widths := make([]int, len(t[0]))
	for _, row := range t {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell), 3)
		}
	}
	var b strings.Builder
	for n, row := range t {
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if numbers && i > 0 {
				cell, pad = pad, cell
			}
			b.WriteString("| " + cell + pad + " ")
		}
		b.WriteString("|\n")
		if n == 0 {
			b.WriteString(rule(widths, numbers))
		}
	}
	return b.String()
}

// rule returns the line below the head.
func rule(widths []int, numbers bool) string {
	var b strings.Builder
	for i, width := range widths {
		end := "-"
		if numbers && i > 0 {
			end = ":"
		}
		b.WriteString("|" + strings.Repeat("-", width+1) + end)
	}
	return b.String() + "|\n"
}
