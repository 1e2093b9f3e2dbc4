package command_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/command"
)

// TestGently: Gently returns the beginning of the output, also of a program that fails, which can write all of its output.
func TestGently(t *testing.T) {
	out, err := sh("echo first; echo second >&2; yes | head -c 1000000; echo why; exit 3").Gently(t.Context(), 10, halfTheTime)
	var exit *command.Error
	if out != "first\nseco" || !errors.As(err, &exit) || exit.Code != 3 {
		t.Errorf("got output %q, %v, want its first 10 bytes, and exit status 3", out, err)
	}
	if out, err := sh("echo yes").Gently(t.Context(), 10, halfTheTime); out != "yes\n" || err != nil {
		t.Errorf("got output %q, %v, want yes", out, err)
	}
	if _, err := (command.Command{Name: "/nowhere/program"}).Gently(t.Context(), 1, halfTheTime); !errors.Is(err, command.ErrMissing) {
		t.Errorf("missing program: got %v, want ErrMissing", err)
	}
}

// halfTheTime is a Turn that pauses for as long as a piece takes.
func halfTheTime(ctx context.Context, piece func() (int64, error)) error {
	began := time.Now()
	_, err := piece()
	select {
	case <-ctx.Done():
	case <-time.After(time.Since(began)):
	}
	return err
}

// TestGentlyPauses: a program is stopped and continued in turns, and killed when the context ends.
func TestGentlyPauses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := sh("echo $$ >"+file+".tmp; mv "+file+".tmp "+file+"; exec sleep 1000").Gently(ctx, 10, halfTheTime)
		done <- err
	}()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(file); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the program does not start")
		}
	}
	pid := readPID(t, file)
	for _, stopped := range []bool{true, false, true, false} {
		awaitStopped(t, pid, stopped)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	awaitEnd(t, pid)
}

// TestGentlyBytes: a turn learns how many bytes the program has read from a disk.
func TestGentlyBytes(t *testing.T) {
	const size = 64 << 20
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	var bytes int64
	count := func(_ context.Context, piece func() (int64, error)) error {
		n, err := piece()
		bytes += n
		return err
	}
	if _, err := sh("sync "+file+"; sleep 0.3; exec dd if="+file+" of=/dev/null bs=4k iflag=direct").Gently(t.Context(), 1000, count); err != nil {
		t.Fatal(err)
	}
	if bytes < size/8 || bytes > 2*size { // what the last piece has read is not known
		t.Errorf("got %d bytes, want most of %d", bytes, size)
	}
}

// awaitStopped waits until a process is stopped by a signal, or is not.
func awaitStopped(t *testing.T, pid int, stopped bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(stat), ") T ") == stopped {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("process %d: stopped is not %t within 10 s: %s", pid, stopped, stat)
		}
	}
}
