package confine

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// TestFilter: on each architecture, the filter refuses the refused and the unknown calls, and all calls of other ABIs.
// It allows others.
func TestFilter(t *testing.T) {
	const x32 = 1 << 30
	unknown := []uint32{newest + 1, x32 | unix.SYS_GETPID, x32, 1<<32 - 1}
	allowed := []uint32{unix.SYS_READ, unix.SYS_IOCTL, unix.SYS_MOUNT, unix.SYS_EXECVE, unix.SYS_EXIT_GROUP, unix.SYS_SECCOMP, newest}
	for name, architecture := range architectures {
		t.Run(name, func(t *testing.T) {
			result := interpreter(t, filter(architecture))
			for _, call := range append(unknown, refused...) {
				if got := result(call, architecture); got != failed {
					t.Errorf("call %#x: got result %#x, want %#x", call, got, failed)
				}
			}
			for _, call := range allowed {
				if got := result(call, architecture); got != unix.SECCOMP_RET_ALLOW {
					t.Errorf("call %#x: got result %#x, want that it is allowed", call, got)
				}
				for _, other := range []uint32{unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_ARM, 0} {
					if got := result(call, other); got != failed {
						t.Errorf("call %#x of architecture %#x: got result %#x, want %#x", call, other, got, failed)
					}
				}
			}
		})
	}
}

// interpreter returns a function that runs a filter for a call of an architecture.
func interpreter(t *testing.T, program []unix.SockFilter) func(call, architecture uint32) uint32 {
	t.Helper()
	var raw []bpf.RawInstruction
	for _, i := range program {
		raw = append(raw, bpf.RawInstruction{Op: i.Code, Jt: i.Jt, Jf: i.Jf, K: i.K})
	}
	instructions, ok := bpf.Disassemble(raw)
	if !ok {
		t.Fatalf("got an invalid instruction in %+v", instructions)
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		t.Fatal(err)
	}
	return func(call, architecture uint32) uint32 {
		// The interpreter loads numbers in big endian, the kernel in the order of the machine.
		result, err := vm.Run(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, call), architecture))
		if err != nil {
			t.Fatal(err)
		}
		return uint32(result)
	}
}

// TestNewest: golang.org/x/sys knows no newer call. A newer one may have to be refused.
func TestNewest(t *testing.T) {
	dir, err := exec.Command("go", "list", "-f", "{{.Dir}}", "golang.org/x/sys/unix").Output()
	if err != nil {
		t.Fatal(err)
	}
	constant := regexp.MustCompile(`(?m)^\s+(SYS_\w+)\s+= (\d+)$`)
	for name := range architectures {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "zsysnum_linux_"+name+".go"))
		if err != nil {
			t.Fatal(err)
		}
		highest := 0
		for _, match := range constant.FindAllStringSubmatch(string(text), -1) {
			number, err := strconv.Atoi(match[2])
			if err != nil {
				t.Fatal(err)
			}
			if number > newest {
				t.Errorf("%s: got %s: decide whether it is refused, and set newest to the last call", name, match[1])
			}
			highest = max(highest, number)
		}
		if highest < newest {
			t.Errorf("%s: got %d as the highest number, want at least %d", name, highest, newest)
		}
	}
}
