package confine

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/sys"
)

// confinedRole is the first argument of this program if it must confine itself and then run a program.
const confinedRole = "confined"

// init keeps the main thread, which the runtime never ends, from running the test whose thread must end.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == confinedRole {
		if err := runConfined(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(m)
}

// runConfined confines this process, makes the refused calls, and runs a program with the same standard input.
func runConfined(words []string) error {
	if _, err := DropCapabilities(); err != nil {
		return err
	}
	if err := RefuseCalls(); err != nil {
		return err
	}
	for _, call := range refused {
		if _, _, errno := unix.Syscall6(uintptr(call), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0), ^uintptr(0)); errno != unix.ENOSYS {
			return fmt.Errorf("call %d: got %w, want ENOSYS", call, errno)
		}
	}
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

// confined returns a command that runs this program in its role, which then runs a program.
func confined(t *testing.T, words ...string) []string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return append([]string{path, confinedRole}, words...)
}

// status prints the statuses of all threads of its parent, and of itself (proc_pid_status(5)).
var status = []string{"sh", "-c", "cat /proc/$PPID/task/*/status /proc/self/status || true"} // a thread can end meanwhile

// TestConfined: all threads of a confined process and its child have only the needed capabilities that the process had before, and
// a filter. A process with fewer capabilities keeps working.
func TestConfined(t *testing.T) {
	testenv.RequireRoot(t)
	all := bounding(t)
	for _, row := range []struct {
		name                             string
		with                             []string // flags of setpriv(1)
		permitted, bounding, inheritable set
	}{
		{"privileged", []string{"--inh-caps=-all"}, all & needed(), all & needed(), 0},
		{"inheritable", []string{"--inh-caps=-all,+chown,+net_raw"}, all & needed(), all & needed(), 1 << unix.CAP_CHOWN},
		{
			"without SETPCAP",
			[]string{"--bounding-set=-all,+mknod,+net_raw", "--inh-caps=-all"},
			1 << unix.CAP_MKNOD, 1<<unix.CAP_MKNOD | 1<<unix.CAP_NET_RAW, 0,
		},
		{"fewer than needed", []string{"--bounding-set=-all,+chown", "--inh-caps=-all"}, 1 << unix.CAP_CHOWN, 1 << unix.CAP_CHOWN, 0},
		{"none", []string{"--bounding-set=-all", "--inh-caps=-all"}, 0, 0, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			out, err := exec.Command("setpriv", append(append(row.with, "--"), confined(t, status...)...)...).CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for field, want := range map[string]string{
				"CapPrm": mask(row.permitted), "CapEff": mask(row.permitted), "CapBnd": mask(row.bounding),
				"CapInh": mask(row.inheritable), "CapAmb": mask(0), "NoNewPrivs": "1", "Seccomp": "2",
			} {
				got := values(string(out), field)
				if len(got) < 3 {
					t.Errorf("%s: got %d values, want those of several threads and of the child", field, len(got))
				}
				for _, value := range got {
					if value != want {
						t.Errorf("%s: got %s, want %s", field, value, want)
					}
				}
			}
		})
	}
}

// TestDeathSignal: a process that gets a signal when its parent ends still gets it after it has confined itself.
func TestDeathSignal(t *testing.T) {
	testenv.RequireRoot(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	words := confined(t, "sh", "-c", "echo started; cat")
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if _, err := cmd.StdinPipe(); err != nil { // Wait closes it, and cat ends
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	err = sys.OnOwnThread(func() error { // the parent is this thread, which ends
		if err := cmd.Start(); err != nil {
			return err
		}
		_, err := bufio.NewReader(out).ReadString('\n')
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil || err.Error() != "signal: "+syscall.SIGTERM.String() {
		t.Errorf("got %v after the end of the parent, want the end by SIGTERM", err)
	}
}

// bounding returns the bounding set of this process.
func bounding(t *testing.T) set {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	s, err := strconv.ParseUint(values(string(text), "CapBnd")[0], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return set(s)
}

// mask returns a set as in proc_pid_status(5).
func mask(s set) string { return fmt.Sprintf("%016x", uint64(s)) }

// values returns the values of a field in statuses.
func values(statuses, field string) (all []string) {
	for line := range strings.Lines(statuses) {
		if value, ok := strings.CutPrefix(line, field+":\t"); ok {
			all = append(all, strings.TrimSpace(value))
		}
	}
	return all
}
