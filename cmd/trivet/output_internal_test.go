package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// row is a value with a table.
type row struct {
	Name  string `json:"name"`
	Bytes int64  `json:"sizeBytes"`
	State string `json:"state,omitempty"`
}

func rowTable(rows []row) table {
	return newTable(
		rows,
		column[row]{name: "NAME", cell: func(r row) string { return r.Name }},
		column[row]{name: "STATE", cell: func(r row) string { return r.State }, color: func(r row) color {
			return map[string]color{"failed": red}[r.State]
		}},
		column[row]{name: "SIZE", wide: true, cell: func(row) string { return "1 GiB" }},
	)
}

// TestOutputFormats: the same value is written as a table, a wide table, JSON and YAML.
func TestOutputFormats(t *testing.T) {
	rows := []row{{"a\nb", 1 << 40, "failed"}, {"long-name", 2, "ok"}}
	for format, want := range map[string]string{
		tableFormat: "NAME       STATE\na b        failed\nlong-name  ok\n",
		wideFormat:  "NAME       STATE   SIZE\na b        failed  1 GiB\nlong-name  ok      1 GiB\n",
		jsonFormat:  "[\n  {\n    \"name\": \"a\\nb\",\n    \"sizeBytes\": 1099511627776,\n    \"state\": \"failed\"\n  },\n",
		yamlFormat:  "- name: |-\n    a\n    b\n  sizeBytes: 1099511627776\n  state: failed\n",
	} {
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		o := &output{format, cmd}
		if err := o.write(rows, rowTable(rows)); err != nil || !strings.HasPrefix(out.String(), want) {
			t.Errorf("%s: got error %v, output\n%q\nwant the beginning\n%q", format, err, &out, want)
		}
	}
}

// TestColors: a colored column of a terminal is aligned as without colors.
func TestColors(t *testing.T) {
	all := rowTable([]row{{Name: "a", State: "failed"}, {Name: "b", State: "ok"}})
	var plain, colored bytes.Buffer
	check(t, writeTables(&plain, []table{all}, true, false))
	check(t, writeTables(&colored, []table{all}, true, true))
	if text := colored.String(); !strings.Contains(text, string(red)+"failed"+colorEnd) || strings.Contains(plain.String(), "\x1b") {
		t.Errorf("got %q and %q, want failed in red only in the first", text, &plain)
	}
	if stripped := strings.NewReplacer(string(red), "", string(noColor), "", colorEnd, "").Replace(colored.String()); stripped != plain.String() {
		t.Errorf("got without escape sequences\n%s\nwant\n%s", stripped, &plain)
	}
}

// TestSeveralTables: empty ones of several tables are omitted, and an empty line separates the others.
func TestSeveralTables(t *testing.T) {
	one, none := rowTable([]row{{Name: "a"}}), rowTable(nil)
	var several, single bytes.Buffer
	check(t, writeTables(&several, []table{none, one, none, one}, false, false))
	if want := "NAME  STATE\na     \n\nNAME  STATE\na     \n"; several.String() != want {
		t.Errorf("got %q, want %q", &several, want)
	}
	check(t, writeTables(&single, []table{none}, false, false))
	if want := "NAME  STATE\n"; single.String() != want {
		t.Errorf("got %q, want the header of a single empty table %q", &single, want)
	}
}

// TestNoTerminal: other files than terminals have neither colors nor progress.
func TestNoTerminal(t *testing.T) {
	var out bytes.Buffer
	bar := startProgress(&out)
	bar.next("Reading")
	bar.end()
	if hasColors(&out) || out.Len() != 0 {
		t.Errorf("got colors %t, progress %q, want neither", hasColors(&out), &out)
	}
}

// TestProgressLine: the line appears after a delay, fits in a line, and contains the time.
func TestProgressLine(t *testing.T) {
	for _, tc := range []struct {
		step    string
		running time.Duration
		want    string
	}{
		{"", time.Minute, ""},
		{"Reading pool a", time.Millisecond, ""},
		{"Reading pool a", 1900 * time.Millisecond, "Reading pool a … 1s"},
		{"Reading\x1b[2J", 2 * time.Minute, "Reading [2J … 2m0s"},
		{strings.Repeat("é", 200), 5 * time.Second, strings.Repeat("é", progressWidth-5) + " … 5s"},
	} {
		if got := progressLine(tc.step, tc.running); got != tc.want {
			t.Errorf("%q after %v: got %q, want %q", tc.step, tc.running, got, tc.want)
		}
	}
}

// TestVersion: version prints the same data in all formats.
func TestVersion(t *testing.T) {
	var fromJSON, fromYAML buildInfo
	for format, into := range map[string]any{jsonFormat: &fromJSON, yamlFormat: &fromYAML} {
		out, err := execute("version", "-o", format)
		check(t, err)
		if format == jsonFormat {
			check(t, json.Unmarshal([]byte(out), into))
		} else {
			check(t, yaml.Unmarshal([]byte(out), into))
		}
	}
	if fromJSON != fromYAML || fromJSON.Version != version || !strings.HasPrefix(fromJSON.Go, "go1.") || !strings.Contains(fromJSON.Platform, "/") {
		t.Errorf("got %+v and %+v, want equal data with version, Go and platform", fromJSON, fromYAML)
	}
	wide, err := execute("version", "-o", "wide")
	check(t, err)
	if !strings.Contains(wide, fromJSON.Go) || !strings.Contains(wide, "CSI") {
		t.Errorf("got %s, want Go and CSI", wide)
	}
}

// TestShortCommit: a commit is abbreviated, and changed sources are marked.
func TestShortCommit(t *testing.T) {
	for want, b := range map[string]buildInfo{
		"":                     {},
		"0123456789ab":         {Commit: "0123456789abcdef"},
		"0123456789ab+changes": {Commit: "0123456789abcdef", Modified: true},
	} {
		if got := b.shortCommit(); got != want {
			t.Errorf("%+v: got %q, want %q", b, got, want)
		}
	}
}
