// Package errtext compares errors by their text, for logs that say each one once.
package errtext

import (
	"strings"
	"unicode"
)

// Kind is an error's text without its digits: the same for errors that differ only in
// a time, a port or a count. Of nil it is empty.
func Kind(err error) string {
	if err == nil {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) {
			return -1
		}
		return r
	}, err.Error())
}
