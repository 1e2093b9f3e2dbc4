package loop_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// BenchmarkTrim fills 5 GiB of a thin image of 50 GiB, removes the files and trims the image. It reports the allocated space when
// full and after the trim, and the p99 of requests for another volume of the pool during the trim divided by that after it.
func BenchmarkTrim(b *testing.B) {
	for _, fsType := range []string{"ext4", "xfs"} {
		b.Run(fsType, func(b *testing.B) {
			s := start(b, "80G")
			s.setKind(fsType)
			s.stageNew(b, "trimmed", 50*gib)
			image := s.image()
			quiet := *s
			quiet.staging = b.TempDir()
			quiet.stageNew(b, "quiet", gib)
			r := newRequests(b, quiet.staging)
			for b.Loop() {
				b.ReportMetric(fillAndEmpty(b, s.staging, image), "MiB-full")
				r.compare(b, func() { s.trim(b) })
				b.ReportMetric(allocatedMiB(b, image), "MiB-left")
			}
		})
	}
}

// trim trims the volume.
func (s *subject) trim(b *testing.B) {
	b.Helper()
	if result := s.Trim(b, driver.TrimRequest{Volumes: []string{s.id}})[0]; result.Problem != "" {
		b.Error(result.Problem)
	}
}

// stageNew creates and stages a volume, which is unstaged and deleted when the benchmark ends.
func (s *subject) stageNew(b *testing.B, name string, size int64) {
	b.Helper()
	must(b, s.create(b, name, size, nil))
	must(b, s.stage(b.Context()))
	b.Cleanup(func() {
		must(b, s.unstage(context.Background()))
		must(b, s.delete(context.Background()))
	})
}

// writeRandom writes files of 256 MiB to a filesystem.
func writeRandom(b *testing.B, dir string, n int) (files []string) {
	b.Helper()
	content := make([]byte, 256<<20)
	_, _ = rand.Read(content)
	for i := range n {
		files = append(files, filepath.Join(dir, strconv.Itoa(i)))
		must(b, os.WriteFile(files[i], content, 0o600))
	}
	testenv.Run(b, "sync", "-f", dir)
	return files
}

// fillAndEmpty fills 5 GiB of a filesystem and removes the files. It returns the allocated space of the image when they existed.
func fillAndEmpty(b *testing.B, dir, image string) (fullMiB float64) {
	b.Helper()
	files := writeRandom(b, dir, 20)
	fullMiB = allocatedMiB(b, image)
	for _, file := range files {
		must(b, os.Remove(file))
	}
	testenv.Run(b, "sync", "-f", dir)
	return fullMiB
}

// allocatedMiB returns the allocated space of a file.
func allocatedMiB(b *testing.B, path string) float64 {
	b.Helper()
	var st syscall.Stat_t
	must(b, syscall.Stat(path, &st))
	return float64(st.Blocks*512) / (1 << 20)
}

// requests are the requests for a volume: fio(1) writes and reads 4 KiB at random places of a file. Another process makes them, because
// the Go scheduler would delay them when goroutines of the driver use all CPUs.
type requests struct{ file string }

func newRequests(b *testing.B, dir string) *requests {
	b.Helper()
	r := &requests{filepath.Join(dir, "file")}
	testenv.Run(b, "fio", r.options("--rw=write", "--end_fsync=1")...)
	return r
}

// options returns the arguments of fio.
func (r *requests) options(more ...string) []string {
	return append([]string{"--name=neighbour", "--filename=" + r.file, "--size=256M", "--bs=4k", "--direct=1", "--ioengine=psync"}, more...)
}

// compare makes requests while task runs, and for 20 s after that. It reports the p99 of those during the task divided by that of the
// others.
func (r *requests) compare(b *testing.B, task func()) {
	b.Helper()
	began := time.Now()
	during := r.during(b, task)
	took := time.Since(began)
	after := r.during(b, func() { time.Sleep(20 * time.Second) })
	b.Logf("task of %v: sync p99 %.2f ms, after it %.2f ms, read p99 %.2f ms, after it %.2f ms",
		took.Round(time.Second), 1000*during.sync, 1000*after.sync, 1000*during.read, 1000*after.read)
	b.ReportMetric(during.sync/after.sync, "x-sync-p99")
	b.ReportMetric(during.read/after.read, "x-read-p99")
}

// p99 is the p99 of synchronous writes and of reads in seconds.
type p99 struct{ sync, read float64 }

// during makes requests while task runs.
func (r *requests) during(b *testing.B, task func()) p99 {
	b.Helper()
	runtime.LockOSThread() // Pdeathsig applies to the end of the thread (PR_SET_PDEATHSIG(2const))
	defer runtime.UnlockOSThread()
	fio := exec.Command("fio", r.options("--rw=randrw", "--sync=dsync", "--time_based", "--runtime=1h", "--output-format=json", "--percentile_list=99")...)
	fio.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} // also if the benchmark is interrupted
	var out bytes.Buffer
	fio.Stdout = &out
	must(b, fio.Start())
	task()
	must(b, fio.Process.Signal(os.Interrupt))
	_ = fio.Wait() // the status tells that a signal ended it
	_, report, _ := bytes.Cut(out.Bytes(), []byte("\n{"))
	var jobs struct {
		Jobs []struct{ Read, Write latency }
	}
	must(b, json.Unmarshal(append([]byte("{"), report...), &jobs))
	return p99{sync: jobs.Jobs[0].Write.p99(b), read: jobs.Jobs[0].Read.p99(b)}
}

// latency contains latencies of fio.
type latency struct {
	Completion struct{ Percentile map[string]float64 } `json:"clat_ns"`
}

// p99 returns the p99 in seconds.
func (l latency) p99(b *testing.B) float64 {
	b.Helper()
	ns, ok := l.Completion.Percentile["99.000000"]
	if !ok {
		b.Fatal("fio reported no latency")
	}
	return ns / 1e9
}
