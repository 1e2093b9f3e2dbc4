package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Block is a fenced code block of a page.
type Block struct {
	// Name is the page and the anchor of the heading, such as docs/pools.md#limits. The second block
	// of a language below the same heading has the name docs/pools.md#limits.2, and so on.
	Name     string
	Language string
	// File is the source file that the block quotes, relative to the root of the project. In the
	// page, it follows the language.
	File string
	Text string
}

// Read returns the blocks of README.md and docs/*.md in the project at root.
func Read(root string) ([]Block, error) {
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		return nil, err
	}
	var all []Block
	for _, path := range append([]string{filepath.Join(root, "README.md")}, pages...) {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		page, err := filepath.Rel(root, path)
		if err != nil {
			return nil, err
		}
		all = append(all, blocksOf(page, string(text))...)
	}
	return all, nil
}

// Commands returns the blocks of shell commands in the project at root, by name.
func Commands(root string) (map[string]Block, error) {
	all, err := Read(root)
	commands := map[string]Block{}
	for _, b := range all {
		if b.Language == "sh" {
			commands[b.Name] = b
		}
	}
	return commands, err
}

const fence = "```"

func blocksOf(page, text string) (blocks []Block) {
	var anchor string
	var open *Block
	numbers := map[string]int{}
	for line := range strings.Lines(text) {
		info, fenced := strings.CutPrefix(strings.TrimRight(line, "\n"), fence)
		switch {
		case fenced && open != nil:
			blocks, open = append(blocks, *open), nil
		case fenced:
			open = &Block{}
			open.Language, open.File, _ = strings.Cut(info, " ")
			open.Name = numbered(page+"#"+anchor, open.Language, numbers)
		case open != nil:
			open.Text += line
		case strings.HasPrefix(line, "#"):
			anchor = anchorOf(line)
		}
	}
	return blocks
}

// numbered counts the blocks of one language below one heading, and returns the name of the block.
func numbered(name, language string, numbers map[string]int) string {
	key := name + " " + language
	if numbers[key]++; numbers[key] == 1 {
		return name
	}
	return fmt.Sprintf("%s.%d", name, numbers[key])
}

var notInAnchor = regexp.MustCompile(`[^a-z0-9 -]`)

func anchorOf(heading string) string {
	words := strings.ToLower(strings.TrimSpace(strings.TrimLeft(heading, "#")))
	return strings.ReplaceAll(notInAnchor.ReplaceAllString(words, ""), " ", "-")
}
