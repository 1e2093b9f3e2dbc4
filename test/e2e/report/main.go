// Command report prints a table of the results of Kubernetes' External.Storage tests. For each argument it
// reads the ginkgo report ARGUMENT.json. It fails if a report is missing or contains no test that ran, or if
// a test failed.
package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// suite contains the needed fields of a report (types.Report of github.com/onsi/ginkgo/v2).
type suite struct {
	SpecReports []spec
}

// spec contains the needed fields of a types.SpecReport.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	Failure                 struct{ Message string }
}

// outcome counts specs by their result. reasons counts the specs that skipped themselves, by their reason.
type outcome struct {
	passed, failed int
	reasons        map[string]int
	failures       []string
}

func main() {
	log.SetFlags(0)
	fmt.Println("| tests | passed | failed | skipped themselves |")
	fmt.Println("|---|--:|--:|--:|")
	var all outcome
	all.reasons = map[string]int{}
	for _, path := range os.Args[1:] {
		o, err := read(path + ".json")
		if err == nil && o.passed+o.failed == 0 {
			err = fmt.Errorf("%s: no test ran", path)
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("| %s | %d | %d | %d |\n", filepath.Base(path), o.passed, o.failed, o.skipped())
		all.add(o)
	}
	fmt.Println("\n| reason of skipped tests | times |")
	fmt.Println("|---|--:|")
	for _, why := range slices.SortedFunc(maps.Keys(all.reasons), func(a, b string) int {
		return cmp.Or(all.reasons[b]-all.reasons[a], cmp.Compare(a, b))
	}) {
		fmt.Printf("| %s | %d |\n", why, all.reasons[why])
	}
	if all.failed > 0 {
		log.Fatalf("%d tests failed:\n%s", all.failed, strings.Join(all.failures, "\n"))
	}
}

// read counts the specs in a report.
func read(path string) (outcome, error) {
	o := outcome{reasons: map[string]int{}}
	b, err := os.ReadFile(path)
	if err != nil {
		return o, err
	}
	var suites []suite
	if err := json.Unmarshal(b, &suites); err != nil {
		return o, fmt.Errorf("%s: %w", path, err)
	}
	for _, s := range suites {
		for _, one := range s.SpecReports {
			o.count(one)
		}
	}
	return o, nil
}

// count adds the result of a spec.
func (o *outcome) count(s spec) {
	switch {
	case s.State == "passed" && s.LeafNodeType == "It":
		o.passed++
	case s.State == "skipped" && s.Failure.Message != "":
		o.reasons[why(s.Failure.Message)]++
	case s.State == "passed", s.State == "skipped", s.State == "pending":
		// A setup node, or a spec that a filter excluded.
	default:
		o.failed++
		o.failures = append(o.failures, fmt.Sprintf("%s: %s %s: %s", s.State, strings.Join(s.ContainerHierarchyTexts, " "), s.LeafNodeText, s.Failure.Message))
	}
}

// why returns the reason of a skip, without details of this machine.
func why(message string) string {
	line, _, _ := strings.Cut(message, "\n")
	line, _, _ = strings.Cut(line, ": 'error reading SSH key")
	return strings.TrimRight(strings.TrimSuffix(line, "skipping"), " -")
}

// skipped returns the number of specs that skipped themselves.
func (o *outcome) skipped() int {
	n := 0
	for _, times := range o.reasons {
		n += times
	}
	return n
}

// add adds the counts of another outcome.
func (o *outcome) add(other outcome) {
	o.passed += other.passed
	o.failed += other.failed
	o.failures = append(o.failures, other.failures...)
	for why, times := range other.reasons {
		o.reasons[why] += times
	}
}
