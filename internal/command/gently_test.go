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
	out, err := sh("echo first; echo second >&2; yes | head -c 1000000; echo why; exit 3").Gently(t.Context(), 10)
	var exit *command.Error
	if out != "first\nseco" || !errors.As(err, &exit) || exit.Code != 3 {
		t.Errorf("got output %q, %v, want its first 10 bytes, and exit status 3", out, err)
	}
	if out, err := sh("echo yes").Gently(t.Context(), 10); out != "yes\n" || err != nil {
		t.Errorf("got output %q, %v, want yes", out, err)
	}
	if _, err := (command.Command{Name: "/nowhere/program"}).Gently(t.Context(), 1); !errors.Is(err, command.ErrMissing) {
		t.Errorf("missing program: got %v, want ErrMissing", err)
	}
}

// TestGentlyPauses: a program is stopped and continued in turns, and killed when the context ends.
func TestGentlyPauses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := sh("echo $$ >"+file+".tmp; mv "+file+".tmp "+file+"; exec sleep 1000").Gently(ctx, 10)
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
