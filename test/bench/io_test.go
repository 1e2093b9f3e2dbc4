package main

import (
	"bytes"
	"context"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/measure"
)

// TestIO measures I/O in a file and in each kind of volume of a directory. It checks that the output has a row for each
// figure, with a value in each place.
func TestIO(t *testing.T) {
	testenv.RequireRoot(t)
	var out bytes.Buffer
	o := options{binary: binary, rounds: 1, quick: true, io: true, in: t.TempDir(), duration: 50 * time.Millisecond, profiles: ioProfiles[len(ioProfiles)-1:]}
	for _, p := range o.parts() {
		if err := p.run(t.Context(), o, &out); err != nil {
			t.Fatal(err)
		}
	}
	const places = "file | directory | image, ext4 | image, xfs | image, btrfs | image, block"
	rows := map[string]int{} // the number of values of each row
	for line := range strings.Lines(out.String()) {
		if cells := strings.Split(strings.Trim(line, "| \n"), "|"); len(cells) > 2 {
			for i, cell := range cells {
				cells[i] = strings.TrimSpace(cell)
			}
			values := slices.DeleteFunc(slices.Clone(cells[2:]), func(cell string) bool { return cell == "" })
			rows[cells[0]+", "+cells[1]] = len(values)
			if cells[0] == "I/O" && strings.Join(values, " | ") != places {
				t.Errorf("got the places %q, want %q", values, places)
			}
		}
	}
	for _, profile := range o.profiles {
		for _, f := range profile.figures {
			if row := profile.name + ", " + f.unit; rows[row] != strings.Count(places, "|")+1 {
				t.Errorf("the output has no row %q with a value in each place:\n%s", row, &out)
			}
		}
	}
}

// TestProfiles runs fio with each profile in a file.
func TestProfiles(t *testing.T) {
	testenv.RequireRoot(t)
	err := measure.InDirectory(t.Context(), t.TempDir(), func(g *measure.Testbed) {
		f, p := fio{size: mib, duration: 20 * time.Millisecond}, inDirectory("file", g.Disk)
		f.fill(t.Context(), p)
		for _, profile := range ioProfiles {
			o := f.load(profile).run(t.Context(), meter{}, p)
			for _, figure := range profile.figures {
				if figure.of(o) <= 0 {
					t.Errorf("%s: %s is %v", profile.name, figure.unit, figure.of(o))
				}
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestInterruptedIO interrupts fio while volumes of each kind are published. It checks that nothing is left.
func TestInterruptedIO(t *testing.T) {
	testenv.RequireRoot(t)
	ctx, interrupt := context.WithCancel(t.Context())
	o := options{binary: binary, rounds: 1000, quick: true, io: true, in: t.TempDir(), duration: 50 * time.Millisecond, profiles: ioProfiles}
	ended := make(chan error, 1)
	go func() { ended <- o.parts()[0].run(ctx, o, io.Discard) }()
	awaitFio(t, o.in)
	interrupt()
	if err := <-ended; err == nil || err.Error() != "interrupted" {
		t.Errorf("got error %v, want only that it was interrupted", err)
	}
	if left, err := os.ReadDir(o.in); err != nil || len(left) > 0 {
		t.Errorf("files left: %v, %v", left, err)
	}
}

// awaitFio waits until fio makes I/O below a directory.
func awaitFio(t *testing.T, dir string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		all, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range all {
			// The file is missing if the process has ended since.
			if b, err := os.ReadFile(path); err == nil && bytes.HasPrefix(b, []byte("fio\x00")) && bytes.Contains(b, []byte(dir)) {
				return
			}
		}
	}
	t.Fatal("timed out waiting for fio")
}

// TestOwnTime: the CPU time of a run is not known if other programs used too much, or used more or less after it than before.
func TestOwnTime(t *testing.T) {
	unknown := math.NaN()
	for _, tc := range []struct{ total, before, after, want float64 }{
		{100, 0, 0, 100},
		{110, 10, 10, 100},
		{110, 8, 12, 100},
		{110, 4, 16, unknown},
		{125, 25, 25, unknown},
		{10, 20, 20, unknown},
		{0, 0, 0, unknown},
	} {
		if got := ownTime(tc.total, tc.before, tc.after); got != tc.want && !(math.IsNaN(got) && math.IsNaN(tc.want)) {
			t.Errorf("%v, of which other programs used %v before and %v after the run: got %v, want %v", tc.total, tc.before, tc.after, got, tc.want)
		}
	}
}

// TestUnknownCPU: the table has no CPU time if it is not known in most rounds, and no ratio if that of the floor is not known.
func TestUnknownCPU(t *testing.T) {
	floor, volume := &place{name: "file"}, &place{name: "directory"}
	l := load{name: "reads"}
	r := &ioResult{places: []*place{floor, volume}, loads: []load{l}}
	rounds := func(cpu []float64) (all []*outcome) {
		for _, c := range cpu {
			all = append(all, &outcome{operations: 2, cpu: c})
		}
		return all
	}
	unknown := math.NaN()
	for _, tc := range []struct {
		floor, volume []float64
		want          string
	}{
		{[]float64{2}, []float64{3}, "1.5 (1.5–1.5) 1.50"},
		{[]float64{2}, []float64{unknown, 3, 4}, "2.0 (1.5–2.0) 2.00"},
		{[]float64{unknown, 2, unknown}, []float64{3}, "1.5 (1.5–1.5)"},
		{[]float64{2}, []float64{unknown, 3}, ""},
	} {
		r.outcomes = map[ioKey][]*outcome{{l.name, floor}: rounds(tc.floor), {l.name, volume}: rounds(tc.volume)}
		if got := r.cell(l, volume, perOperation); got != tc.want {
			t.Errorf("%v µs, and %v µs in the floor: got cell %q, want %q", tc.volume, tc.floor, got, tc.want)
		}
	}
}

// TestParseFio reads the output of fio for a job that calls fdatasync(2), and for one that reads and writes.
func TestParseFio(t *testing.T) {
	for name, tc := range map[string]struct {
		out  string
		want outcome
	}{
		"fdatasync": {fdatasyncReport, outcome{operations: 30, rate: 99.667774, bytes: 408239, p50: 197632, p99: 74973184}},
		"mixed":     {mixedReport, outcome{operations: 4000, rate: 40000.5, bytes: 160000000, p50: 100, p99: 200}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseFio([]byte(tc.out))
			if err != nil || *got != tc.want {
				t.Errorf("got %+v, %v, want %+v", got, err, tc.want)
			}
		})
	}
	for _, out := range []string{"", "fio: no such option", `{"jobs": []}`, `{"jobs": [{}]}`} {
		if got, err := parseFio([]byte(out)); err == nil {
			t.Errorf("%q: got %+v, want an error", out, got)
		}
	}
}

// TestParsePgbench reads the output of pgbench.
func TestParsePgbench(t *testing.T) {
	got, err := parsePgbench(pgbenchReport)
	if want := (outcome{operations: 923, rate: 918.439946}); err != nil || *got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	if got, err := parsePgbench("pgbench: error"); err == nil {
		t.Errorf("got %+v, want an error", got)
	}
}

// TestProfilesDocumented checks that the table of the profiles in docs/benchmarks-io.md has all rows.
func TestProfilesDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/benchmarks-io.md")
	if err != nil {
		t.Fatal(err)
	}
	for row := range strings.Lines(profileTable()) {
		row = strings.Join(strings.Fields(row), " ") // the columns of the page are not aligned
		if !strings.HasPrefix(row, "|--") && !strings.Contains(string(page), row+"\n") {
			t.Errorf("docs/benchmarks-io.md does not contain the row %q", row)
		}
	}
}

// Parts of the output of fio and pgbench.
const (
	fdatasyncReport = `note: a note of fio
{
  "fio version" : "fio-3.33",
  "jobs" : [
    {
      "jobname" : "io",
      "read" : {"bw_bytes" : 0, "iops" : 0.000000, "total_ios" : 0, "lat_ns" : {"mean" : 0.000000, "N" : 0}},
      "write" : {"bw_bytes" : 408239, "iops" : 99.667774, "total_ios" : 30, "lat_ns" : {"N" : 30, "percentile" : {"50.000000" : 11712, "99.000000" : 31872}}},
      "sync" : {"total_ios" : 0, "lat_ns" : {"N" : 30, "percentile" : {"50.000000" : 197632, "99.000000" : 74973184}}}
    }
  ]
}
`
	mixedReport = `{
  "jobs" : [
    {
      "read" : {"bw_bytes" : 120000000, "iops" : 30000.250000, "total_ios" : 3000, "lat_ns" : {"percentile" : {"50.000000" : 150, "99.000000" : 300}}},
      "write" : {"bw_bytes" : 40000000, "iops" : 10000.250000, "total_ios" : 1000, "lat_ns" : {"percentile" : {"50.000000" : 100, "99.000000" : 200}}},
      "sync" : {"total_ios" : 0, "lat_ns" : {"N" : 0}}
    }
  ]
}`
	pgbenchReport = `pgbench (15.18 (Debian 15.18-0+deb12u1))
transaction type: <builtin: TPC-B (sort of)>
number of transactions actually processed: 923
number of failed transactions: 0 (0.000%)
latency average = 4.355 ms
initial connection time = 8.369 ms
tps = 918.439946 (without initial connection time)
`
)
