// Package mountflags separates mount flags into words, and parses the flag that sets an SELinux context.
package mountflags

import (
	"regexp"
	"strings"
)

// Context is the key of the flag that sets the SELinux context of a filesystem (mount(8)).
const Context = "context"

var (
	wordPattern    = regexp.MustCompile(`(?:"[^"]*"|[^,])+`)
	contextPattern = regexp.MustCompile(`^(?:"([A-Za-z0-9._:,-]{1,255})"|([A-Za-z0-9._:-]{1,255}))$`) // fsconfig(2) accepts at most 255 bytes
)

// Split separates flags, each of which may contain several words. A comma between double quotes does not separate
// words, because the categories of an SELinux context are separated by commas.
func Split(flags []string) []string {
	var words []string
	for _, flag := range flags {
		words = append(words, wordPattern.FindAllString(flag, -1)...)
	}
	return words
}

// IsContext reports whether a word sets an SELinux context.
func IsContext(word string) bool {
	key, _, _ := strings.Cut(word, "=")
	return key == Context
}

// ParseContext parses the value of Context, which may be between double quotes. It returns the context without them.
func ParseContext(value string) (context string, ok bool) {
	found := contextPattern.FindStringSubmatch(value)
	if found == nil {
		return "", false
	}
	return found[1] + found[2], true
}

// ForContext returns the word that sets an SELinux context.
func ForContext(context string) string { return Context + `="` + context + `"` }
