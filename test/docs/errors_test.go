package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// ignored contains texts that docs/reference/errors.md quotes but the source does not contain as literals.
var ignored = []string{
	// Messages of the kernel, of Go and of Kubernetes.
	"signal: killed", "OOMKilled",
	"client didn't provide a certificate", "first record does not look like a TLS handshake",
	`volume mode "Ephemeral" not supported by driver`, "ValidatingAdmissionPolicy", "denied request",
}

var (
	quoted = regexp.MustCompile("`[^`]+`")
	verb   = regexp.MustCompile(`%[-+# 0-9.]*[a-zA-Z]|%\[\d+\][a-zA-Z]`) // a formatting verb of package fmt
	letter = regexp.MustCompile(`[a-zA-Z]`)
)

// TestErrorsDocumented checks that the source contains every message that docs/reference/errors.md quotes. An
// ellipsis in a quote stands for a value.
func TestErrorsDocumented(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/reference/errors.md"))
	if err != nil {
		t.Fatal(err)
	}
	all := literals(t)
	found := 0
	for line := range strings.Lines(string(page)) {
		messages, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		for _, text := range quoted.FindAllString(messages, -1) {
			found++
			for part := range strings.SplitSeq(strings.Trim(text, "`"), "…") {
				part = strings.Trim(part, ` :;,."'=[]`)
				if !slices.Contains(ignored, part) && !occurs(part, all) {
					t.Errorf("docs/reference/errors.md quotes %s, but no message of the source contains %q", text, part)
				}
			}
		}
	}
	if found < 40 {
		t.Errorf("got %d quoted messages, want at least 40: the pattern does not match them any more", found)
	}
}

// occurs reports whether a message contains a text, possibly with values in place of the message's
// formatting verbs.
func occurs(part string, messages []message) bool {
	if len(letter.FindAllString(part, -1)) < 4 {
		return true // too short to identify a message
	}
	words := wordsOf(part)
	return slices.ContainsFunc(messages, func(m message) bool {
		return strings.Contains(m.text, part) || verb.MatchString(m.text) && m.formats(words)
	})
}

// message is a string literal of the source with its words.
type message struct {
	text  string
	words []word
}

// word is a word of a message.
type word struct {
	text string
	// pattern matches the word with values in place of its formatting verbs; nil if it has no verbs.
	pattern *regexp.Regexp
}

// newMessage returns a string literal with its words.
func newMessage(text string) message {
	m := message{text: text}
	for _, part := range wordsOf(text) {
		w := word{text: part}
		if pieces := verb.Split(part, -1); len(pieces) > 1 {
			for i := range pieces {
				pieces[i] = regexp.QuoteMeta(pieces[i])
			}
			w.pattern = regexp.MustCompile("^" + strings.Join(pieces, ".+") + "$")
		}
		m.words = append(m.words, w)
	}
	return m
}

// wordsOf returns the words of a text without punctuation.
func wordsOf(text string) (words []string) {
	for w := range strings.FieldsSeq(text) {
		words = append(words, strings.Trim(w, `:;,."'()[]`))
	}
	return words
}

// formats reports whether consecutive words of the message match the words of a text. At least two
// words, and half of the words, must match without a formatting verb.
func (m message) formats(text []string) bool {
	for i := range len(m.words) - len(text) + 1 {
		exact := 0 // the number of words that match without a formatting verb; -1 if a word does not match
		for k, want := range text {
			w := m.words[i+k]
			if w.pattern == nil && w.text != want || w.pattern != nil && !w.pattern.MatchString(want) {
				exact = -1
				break
			}
			if w.pattern == nil {
				exact++
			}
		}
		if exact >= 2 && 2*exact >= len(text) {
			return true
		}
	}
	return false
}

// literals returns the string literals of the source and the lines of the chart. Literals that the
// source concatenates are one message.
func literals(t *testing.T) (all []message) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && path != root || name == "test" || name == "bin"):
			return filepath.SkipDir
		case strings.HasPrefix(name, "deploy/chart/") && !d.IsDir():
			text, err := os.ReadFile(path)
			for line := range strings.Lines(string(text)) {
				all = append(all, newMessage(line))
			}
			return err
		case d.IsDir(), !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if x, ok := n.(ast.Expr); ok {
				if text := literal(x); text != "" && utf8.ValidString(text) {
					all = append(all, newMessage(text))
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// literal returns the text of a string literal, or of a concatenation, in which %s stands for each
// operand that is no literal. It is empty for other expressions.
func literal(x ast.Expr) string {
	switch x := x.(type) {
	case *ast.BasicLit:
		if x.Kind == token.STRING {
			text, _ := strconv.Unquote(x.Value)
			return text
		}
	case *ast.BinaryExpr:
		if x.Op == token.ADD {
			left, right := literal(x.X), literal(x.Y)
			if left+right != "" {
				return orVerb(left) + orVerb(right)
			}
		}
	}
	return ""
}

// orVerb returns the text of an operand, or %s for an operand without a text.
func orVerb(text string) string {
	if text == "" {
		return "%s"
	}
	return text
}
