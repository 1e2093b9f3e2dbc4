package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/driver"
)

// TestWriteChecks: the output names each result and the errors of damaged filesystems. The command fails unless all are clean.
func TestWriteChecks(t *testing.T) {
	clean := driver.CheckResult{Name: "one", Pool: "p", Result: driver.CheckClean, Seconds: 1.25}
	damaged := driver.CheckResult{Name: "two", Pool: "p", Result: driver.CheckDamaged, Errors: "first\nsecond\n"}
	failed := driver.CheckResult{ID: "three", Result: driver.CheckFailed, Problem: "it does not exist"}
	for _, tc := range []struct {
		name    string
		results []driver.CheckResult
		err     error
		says    []string
	}{
		{"clean", []driver.CheckResult{clean}, nil, []string{"p     one     clean   1.3s  -       -\n"}},
		{"damaged", []driver.CheckResult{clean, damaged}, errNotClean, []string{"two     damaged", "two     first\n", "two     second\n"}},
		{"failed", []driver.CheckResult{clean, failed}, errNotClean, []string{"three   failed", "it does not exist\n"}},
	} {
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		if err := writeChecks(&output{tableFormat, cmd}, tc.results); !errors.Is(err, tc.err) {
			t.Errorf("%s: got error %v, want %v", tc.name, err, tc.err)
		}
		for _, want := range tc.says {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: got\n%s\nwant %q", tc.name, &out, want)
			}
		}
	}
}
