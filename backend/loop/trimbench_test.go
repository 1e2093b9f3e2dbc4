package loop_test

import (
	"context"
	"crypto/rand"
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
				ctx, ended := context.WithCancel(b.Context())
				go func() {
					defer ended()
					if result := s.Trim(b, driver.TrimRequest{Volumes: []string{s.id}})[0]; result.Problem != "" {
						b.Error(result.Problem)
					}
				}()
				duringSync, duringRead := r.until(ctx, b)
				b.ReportMetric(allocatedMiB(b, image), "MiB-left")
				ctx, ended = context.WithTimeout(b.Context(), 20*time.Second)
				afterSync, afterRead := r.until(ctx, b)
				ended()
				b.ReportMetric(duringSync/afterSync, "x-sync-p99")
				b.ReportMetric(duringRead/afterRead, "x-read-p99")
			}
		})
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

// fillAndEmpty fills 5 GiB of a filesystem and removes the files. It returns the allocated space of the image when they existed.
func fillAndEmpty(b *testing.B, dir, image string) (fullMiB float64) {
	b.Helper()
	content := make([]byte, 256<<20)
	_, _ = rand.Read(content)
	var files []string
	for i := range 20 {
		files = append(files, filepath.Join(dir, strconv.Itoa(i)))
		must(b, os.WriteFile(files[i], content, 0o600))
	}
	testenv.Run(b, "sync", "-f", dir)
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

// until writes and reads 4 KiB at random places in turn until ctx ends. It returns the p99 of the synchronous writes and of the reads
// in seconds.
func (r *requests) until(ctx context.Context, b *testing.B) (syncP99, readP99 float64) {
	b.Helper()
	var syncs, reads measure.Durations
	for ctx.Err() == nil {
		at := mathrand.Int64N(256<<20/4096) * 4096
		began := time.Now()
		_, err := r.file.WriteAt(r.memory, at)
		written := time.Now()
		must(b, err)
		_, err = r.file.ReadAt(r.memory, at)
		must(b, err)
		syncs.Add(written.Sub(began))
		reads.Add(time.Since(written))
	}
	return syncs.At(99).Seconds(), reads.At(99).Seconds()
}
