package loop_test

import (
	"context"
	"crypto/rand"
	"errors"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/measure"
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

// requests are the requests for a volume.
type requests struct {
	file   *os.File // 256 MiB, with O_DIRECT and O_DSYNC
	memory []byte   // 4 KiB, aligned, which O_DIRECT requires (open(2))
}

func newRequests(b *testing.B, dir string) *requests {
	b.Helper()
	path := filepath.Join(dir, "file")
	content := make([]byte, 256<<20)
	_, _ = rand.Read(content)
	must(b, os.WriteFile(path, content, 0o600))
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT|unix.O_DSYNC, 0)
	must(b, err)
	memory, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	must(b, err)
	b.Cleanup(func() {
		must(b, unix.Munmap(memory))
		must(b, file.Close())
	})
	return &requests{file, memory}
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
type p99 struct {
	sync, read float64
	err        error // of a request
}

// during makes requests while task runs.
func (r *requests) during(b *testing.B, task func()) p99 {
	b.Helper()
	ctx, end := context.WithCancel(b.Context())
	defer end()
	result := make(chan p99, 1)
	go func() { result <- r.until(ctx) }()
	task()
	end()
	got := <-result
	must(b, got.err)
	return got
}

// until writes and reads 4 KiB at random places in turn until ctx ends.
func (r *requests) until(ctx context.Context) p99 {
	var syncs, reads measure.Durations
	for ctx.Err() == nil {
		at := mathrand.Int64N(256<<20/4096) * 4096
		began := time.Now()
		_, writeErr := r.file.WriteAt(r.memory, at)
		written := time.Now()
		_, readErr := r.file.ReadAt(r.memory, at)
		if err := errors.Join(writeErr, readErr); err != nil {
			return p99{err: err}
		}
		syncs.Add(written.Sub(began))
		reads.Add(time.Since(written))
	}
	return p99{sync: syncs.At(99).Seconds(), read: reads.At(99).Seconds()}
}
