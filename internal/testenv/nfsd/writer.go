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

// writer writes data that the server has not received when the program is killed: the shell closes a copy of
// the file after printf, and close(2) of NFS waits for the server.
const writer = `exec 3>"$1" && echo open && read -r go && printf dirty >&3`

// CutWriting is Cut, after which a program writes to a file and is killed. The program keeps the mount busy,
// because it does not end before the server has received the data or the mount is unmounted by force. With
// such a file open in the test itself, the programs that the test starts would hang.
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

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
