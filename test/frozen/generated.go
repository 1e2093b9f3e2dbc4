package frozen

import (
	"os"
	"strings"
	"testing"
)

// Generated fails the test unless the generated part of a page is text. With -update, it writes this part. The part is
// between a comment that ends with the command, and the comment "End of the generated part".
func Generated(t *testing.T, page, command, text string) {
	t.Helper()
	begin, end := "by `"+command+"`. -->\n", "<!-- End of the generated part. -->\n"
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(b), begin)
	have, after, ends := strings.Cut(rest, end)
	switch {
	case !begins || !ends:
		t.Fatalf("%s lacks the lines %q and %q", page, begin, end)
	case have == text:
	case *Update:
		write(t, page, []byte(before+begin+text+end+after))
	default:
		t.Errorf("the generated part of %s is outdated: run %s; want\n%s", page, command, text)
	}
}
