package docs_test

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	printed  = regexp.MustCompile(`markdown\.Table\{\{("[^\n}]*")\}\}`)
	cellText = regexp.MustCompile(`"([^"]*)"`)
)

// TestBenchmarkHeads checks that each table of docs/benchmarks.md has a head that a benchmark prints. The
// tables of make e2e-bench are written by hand, and some heads contain numbers of the run.
func TestBenchmarkHeads(t *testing.T) {
	var heads []string
	for _, pattern := range []string{"test/bench/*.go", "test/scale/*.go"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %d files", pattern, err, len(files))
		}
		for _, file := range files {
			for _, match := range printed.FindAllStringSubmatch(read(t, strings.TrimPrefix(file, root+"/")), -1) {
				var cells []string
				for _, cell := range cellText.FindAllStringSubmatch(match[1], -1) {
					cells = append(cells, cell[1])
				}
				heads = append(heads, strings.Join(cells, " | "))
			}
		}
	}
	page, byHand, _ := strings.Cut(read(t, "docs/benchmarks.md"), "\n## Through Kubernetes\n")
	_, scale, _ := strings.Cut(byHand, "\n## ")
	lines := strings.Split(page+scale, "\n")
	for i, line := range lines {
		if i+1 == len(lines) || !strings.HasPrefix(lines[i+1], "|--") {
			continue
		}
		head := strings.Trim(line, "| ")
		if !slices.Contains(heads, head) && !strings.HasPrefix(head, "since exec") && !strings.HasPrefix(head, "nodes | ") {
			t.Errorf("docs/benchmarks.md has a table with the head %q, which no benchmark prints", head)
		}
	}
}
