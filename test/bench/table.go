package main

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// table is text in columns that is also Markdown.
type table [][]string

func (t *table) row(cells ...string) { *t = append(*t, cells) }

// text writes the table; with numbers all columns but the first end on one line.
func (t table) text(numbers bool) string {
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

func micros(d time.Duration) string { return fmt.Sprintf("%.0f", float64(d)/1e3) }

func millis(d time.Duration) string {
	if d >= 100*time.Millisecond {
		return fmt.Sprintf("%.0f ms", float64(d)/1e6)
	}
	return fmt.Sprintf("%.1f ms", float64(d)/1e6)
}

func times(ratio float64) string { return fmt.Sprintf("%.2f", ratio) }

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/mib) }

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
