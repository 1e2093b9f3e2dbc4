package nfsd

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
)

// writer is a shell script that writes data and then waits for the server. The shell closes a copy of the file
// descriptor after printf, and close(2) on NFS waits until the server has received the data.
const writer = `exec 3>"$1" && echo open && read -r go && printf dirty >&3`

// CutWriting cuts the link while a program writes to a file, and then kills the program. The program keeps the
// mount busy, because it does not end before the server has received the data or the mount is unmounted by force.
// The test itself must not have such a file open, because the programs that it starts would then hang.
func (l *Link) CutWriting(tb testing.TB, file string) {
	tb.Helper()
	c := exec.Command("/bin/sh", "-c", writer, "sh", file)
	in, err := c.StdinPipe()
	check(tb, err)
	out, err := c.StdoutPipe()
	check(tb, err)
	check(tb, c.Start())
	tb.Cleanup(func() { _ = c.Wait() })
	defer func() { _ = c.Process.Kill() }()
	opened := make([]byte, len("open\n"))
	_, err = out.Read(opened)
	check(tb, err)
	l.Cut(tb)
	_, err = in.Write([]byte("go\n"))
	check(tb, err)
	check(tb, retry.For(tb.Context(), time.Minute, func() (bool, error) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.Process.Pid))
		if err == nil && !strings.Contains(string(stat), ") D ") { // proc_pid_stat(5)
			return true, fmt.Errorf("the program that writes %s does not wait: %s", file, stat)
		}
		return false, err
	}))
}

// check fails a test if err is not nil.
func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
