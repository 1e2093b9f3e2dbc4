package confine

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// exitCode is the exit status of the program of writeProgram32.
const exitCode = 42

// TestProgram32: the calls of a 32-bit program, which have other numbers, are refused.
func TestProgram32(t *testing.T) {
	testenv.RequireRoot(t)
	path := writeProgram32(t)
	err := exec.Command(path).Run()
	if errors.Is(err, unix.ENOEXEC) {
		t.Skip("this kernel runs no 32-bit programs; that of the virtual machine does")
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != exitCode {
		t.Fatalf("not confined: got %v, want exit status %d", err, exitCode)
	}
	words, end := confined(t, path), "signal: "+syscall.SIGSEGV.String() // " (core dumped)" can follow
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); !strings.HasPrefix(string(out), end) {
		t.Errorf("confined: got %v, output %q, want the end by SIGSEGV after the refused exit(2)", err, out)
	}
}

// writeProgram32 writes a program that calls exit(2) of the 32-bit ABI. If the call returns, hlt ends the program with SIGSEGV.
func writeProgram32(t *testing.T) (path string) {
	t.Helper()
	code := []byte{
		0xb8, 1, 0, 0, 0, // mov $1, %eax
		0xbb, exitCode, 0, 0, 0, // mov $42, %ebx
		0xcd, 0x80, // int $0x80
		0xf4, // hlt
	}
	const headerSize, segmentSize, address = 52, 32, 0x10000
	size := uint32(headerSize + segmentSize + len(code))
	header := elf.Header32{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS32), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_EXEC), Machine: uint16(elf.EM_386), Version: uint32(elf.EV_CURRENT),
		Entry: address + headerSize + segmentSize, Phoff: headerSize, Ehsize: headerSize, Phentsize: segmentSize, Phnum: 1,
	}
	segment := elf.Prog32{
		Type: uint32(elf.PT_LOAD), Vaddr: address, Paddr: address, Filesz: size, Memsz: size, Flags: uint32(elf.PF_R | elf.PF_X), Align: 0x1000,
	}
	var b bytes.Buffer
	for _, part := range []any{header, segment, code} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	path = filepath.Join(t.TempDir(), "program32")
	if err := os.WriteFile(path, b.Bytes(), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}
