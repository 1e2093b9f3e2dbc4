//go:build vm

package nfs

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
)

// writerCommand is the first argument with which the test binary runs writeRecords.
const writerCommand = "write-records"

// recordSize is the size of a record in bytes.
const recordSize = 4096

// record returns the record with number k. The first record has number 1.
func record(k int) []byte {
	number := binary.BigEndian.AppendUint64(nil, uint64(k))
	return bytes.Repeat(number, recordSize/len(number))
}

// writeRecords appends records to a file until standard input ends. It syncs each record and then
// prints its number. It also writes to a second file, which it does not sync.
func writeRecords(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	scratch, err := os.OpenFile(path+".scratch", os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	go func() { defer close(stop); _, _ = io.Copy(io.Discard, os.Stdin) }()
	for k := 1; ; k++ {
		if err := writeRecord(f, scratch, k); err != nil {
			return err
		}
		fmt.Println(k)
		select {
		case <-stop:
			return errors.Join(scratch.Close(), f.Close())
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// writeRecord appends a record to f and syncs f. It also overwrites scratch, which it does not sync.
func writeRecord(f, scratch *os.File, k int) error {
	if _, err := f.Write(record(k)); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	_, err := scratch.WriteAt(bytes.Repeat(record(k), 16), 0)
	return err
}

// writer is a process that runs writeRecords, as a pod would.
type writer struct {
	path  string
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{} // closed when the process has ended
	err   error         // the result of the process; valid when ended is closed

	mu    sync.Mutex
	acked int // the number of records that are synced
}

// startWriter starts a writer for a new file. It runs until finish, kill or the end of the test.
func startWriter(t *testing.T, path string) *writer {
	t.Helper()
	w := &writer{path: path, cmd: exec.Command("/proc/self/exe", writerCommand, path), ended: make(chan struct{})}
	stdin, err := w.cmd.StdinPipe()
	must(t, err)
	stdout, err := w.cmd.StdoutPipe()
	must(t, err)
	var stderr bytes.Buffer
	w.stdin, w.cmd.Stderr = stdin, &stderr
	must(t, w.cmd.Start())
	go func() {
		defer close(w.ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			w.mu.Lock()
			w.acked, _ = strconv.Atoi(lines.Text())
			w.mu.Unlock()
		}
		if err := w.cmd.Wait(); err != nil {
			w.err = fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
		}
	}()
	t.Cleanup(func() { _ = w.cmd.Process.Kill() })
	return w
}

// acknowledged returns the number of records that are synced.
func (w *writer) acknowledged() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.acked
}

// awaitProgress waits until at least two more records are synced.
func (w *writer) awaitProgress(t *testing.T) {
	t.Helper()
	before := w.acknowledged()
	err := retry.For(t.Context(), waitTimeout, func() (bool, error) {
		select {
		case <-w.ended:
			return false, fmt.Errorf("the writer ended: %w", w.err)
		default:
			return w.acknowledged() <= before+1, fmt.Errorf("got %d records at first and %d after %v", before, w.acknowledged(), waitTimeout)
		}
	})
	if w.acknowledged() <= before+1 {
		t.Errorf("the writer of %s did not make progress: %v", w.path, err)
	}
}

// finish ends the writer, which must not have failed, and checks its records.
func (w *writer) finish(t *testing.T) {
	t.Helper()
	must(t, w.stdin.Close())
	select {
	case <-w.ended:
	case <-time.After(waitTimeout):
		t.Errorf("the writer of %s did not end", w.path)
		return
	}
	if w.err != nil {
		t.Errorf("the writer of %s: %v", w.path, w.err)
	}
	w.wantRecords(t, w.path)
}

// kill sends SIGKILL to the writer, which may not end before its server answers.
func (w *writer) kill() { _ = w.cmd.Process.Kill() }

// wantRecords fails unless a file, on any node, has all acknowledged records.
func (w *writer) wantRecords(t *testing.T, path string) {
	t.Helper()
	wantRecords(t, path, w.acknowledged())
}

// wantRecords fails unless a file has the first n records.
func wantRecords(t *testing.T, path string, n int) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil {
		t.Errorf("%s: %v", filepath.Base(path), err)
		return
	}
	for k := 1; k <= n; k++ {
		end := k * recordSize
		if len(got) < end || !bytes.Equal(got[end-recordSize:end], record(k)) {
			t.Errorf("%s: got %d bytes without record %d, want all %d acknowledged records", path, len(got), k, n)
			return
		}
	}
}
