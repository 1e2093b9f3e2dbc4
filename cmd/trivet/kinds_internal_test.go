package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/test/frozen"
)

const parametersFile = "../../docs/reference/parameters.md"

// TestParametersDocumented: the generated part of docs/reference/parameters.md matches the descriptors of the kinds. With
// -update, the test writes it.
func TestParametersDocumented(t *testing.T) {
	frozen.Generated(t, parametersFile, "make docs-parameters", kindTable(kinds)+"\n"+parameterTable(t, kinds))
}

// kindTable returns the Markdown table of the kinds.
func kindTable(kinds backend.Kinds) string {
	var b strings.Builder
	b.WriteString("| `backend` | a volume is | pools |\n|---|---|---|\n")
	for _, k := range kinds {
		var media []string
		for _, m := range k.Media {
			media = append(media, string(m))
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", k.Name, k.Doc, strings.Join(media, ", "))
	}
	return b.String()
}

// parameterTable returns the Markdown table of the parameters of all kinds.
func parameterTable(t *testing.T, kinds backend.Kinds) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("| key | backends | values | default | meaning |\n|---|---|---|---|---|\n")
	var rows []backend.Parameter
	kindsByRow := map[[2]string][]string{} // kinds may have different parameters with the same key
	for _, k := range kinds {
		for _, p := range k.Takes() {
			row := [2]string{p.Key, p.Doc}
			if kindsByRow[row] == nil {
				rows = append(rows, p)
			}
			kindsByRow[row] = append(kindsByRow[row], k.Name)
		}
	}
	for _, p := range rows {
		if p.Doc == "" {
			t.Errorf("parameter %s has no documentation", p.Key)
		}
		names, values := "all", p.Want
		if len(kindsByRow[[2]string{p.Key, p.Doc}]) < len(kinds) {
			names = code(kindsByRow[[2]string{p.Key, p.Doc}]...)
		}
		if p.Values != nil {
			values = code(p.Values...)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", p.Key, names, values, code(p.Default), p.Doc)
	}
	return b.String()
}

// code formats words as code in Markdown.
func code(words ...string) string {
	if words[0] == "" {
		return ""
	}
	return "`" + strings.Join(words, "`, `") + "`"
}

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
